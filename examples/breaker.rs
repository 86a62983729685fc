//! Scratch: tries to break the registry's edge from outside. `breaker NAME`.
#![allow(clippy::all, clippy::unwrap_used, clippy::disallowed_methods, clippy::disallowed_types, missing_docs, reason = "scratch")]

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst}},
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};
use tokio_stream::StreamExt;
use tonic::{Request, transport::{Server, server::TcpIncoming}};
use tonic_failover::{
    client::{ConsulService, Fallback, GrpcClient, ServiceOptions},
    consul::{ConsulClient, ConsulConfig, HealthQuery},
    testkit::{Agent, Registration},
};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

#[derive(Clone, Debug)]
struct Req { path: String, head: String, conn: usize, nth: usize, at: Duration }
impl Req {
    fn has(&self, s: &str) -> bool { self.path.contains(s) }
    fn index(&self) -> Option<u64> { self.path.split("index=").nth(1)?.split('&').next()?.parse().ok() }
    fn wait(&self) -> Duration { let ms: u64 = self.path.split("wait=").nth(1).and_then(|w| w.split("ms").next()?.parse().ok()).unwrap_or(0); Duration::from_millis(ms) }
    fn blocking(&self) -> bool { self.index().is_some() }
    fn service(&self) -> String { self.path.split("/service/").nth(1).unwrap_or("").split('?').next().unwrap().to_owned() }
}
enum Act { Send(Vec<u8>), SendClose(Vec<u8>), Dribble(Vec<u8>, Vec<u8>, Duration), Hang, Close, After(Duration, Box<Act>) }

struct Raw { port: u16, log: Arc<Mutex<Vec<Req>>>, open: Arc<AtomicUsize>, most: Arc<AtomicUsize> }
impl Raw {
    async fn start(f: impl Fn(&Req) -> Act + Send + Sync + 'static) -> Self {
        let l = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = l.local_addr().unwrap().port();
        let log: Arc<Mutex<Vec<Req>>> = Arc::default();
        let open: Arc<AtomicUsize> = Arc::default();
        let most: Arc<AtomicUsize> = Arc::default();
        let f = Arc::new(f);
        let (lg, op, mo) = (log.clone(), open.clone(), most.clone());
        let t0 = Instant::now();
        tokio::spawn(async move {
            let mut n = 0;
            while let Ok((s, _)) = l.accept().await {
                n += 1;
                let (f, lg, op, mo) = (f.clone(), lg.clone(), op.clone(), mo.clone());
                tokio::spawn(async move {
                    let o = op.fetch_add(1, SeqCst) + 1; mo.fetch_max(o, SeqCst);
                    serve(s, n, t0, &*f, &lg).await;
                    op.fetch_sub(1, SeqCst);
                });
            }
        });
        Self { port, log, open, most }
    }
    fn url(&self) -> String { format!("http://127.0.0.1:{}", self.port) }
    fn count(&self, f: impl Fn(&Req) -> bool) -> usize { self.log.lock().unwrap().iter().filter(|r| f(r)).count() }
}
async fn serve(mut s: TcpStream, conn: usize, t0: Instant, f: &(dyn Fn(&Req) -> Act + Send + Sync), log: &Mutex<Vec<Req>>) {
    let mut buf = Vec::new();
    let mut nth = 0;
    loop {
        let end = loop {
            if let Some(p) = buf.windows(4).position(|w| w == b"\r\n\r\n") { break p + 4; }
            let mut b = [0; 4096];
            match s.read(&mut b).await { Ok(n) if n > 0 => buf.extend_from_slice(&b[..n]), _ => return }
        };
        let head = String::from_utf8_lossy(&buf[..end]).into_owned();
        let len: usize = head.to_lowercase().split("content-length: ").nth(1).and_then(|x| x.split("\r\n").next()?.parse().ok()).unwrap_or(0);
        while buf.len() < end + len { let mut b = [0; 4096]; match s.read(&mut b).await { Ok(n) if n > 0 => buf.extend_from_slice(&b[..n]), _ => return } }
        buf.drain(..end + len);
        nth += 1;
        let path = head.split(' ').nth(1).unwrap_or("").to_owned();
        let req = Req { path, head, conn, nth, at: t0.elapsed() };
        log.lock().unwrap().push(req.clone());
        let mut act = f(&req);
        loop {
            let mut b = [0; 16];
            match act {
                Act::After(d, next) => {
                    tokio::select! { () = sleep(d) => act = *next, r = s.peek(&mut b) => { if matches!(r, Ok(0) | Err(_)) { return } sleep(Duration::from_millis(1)).await; act = *next } }
                    continue;
                }
                Act::Send(x) => { if s.write_all(&x).await.is_err() { return } }
                Act::SendClose(x) => { let _ = s.write_all(&x).await; let _ = s.shutdown().await; return }
                Act::Dribble(h, unit, gap) => { let _ = s.write_all(&h).await; loop { sleep(gap).await; if s.write_all(&unit).await.is_err() { return } } }
                Act::Hang => { while !matches!(s.read(&mut b).await, Ok(0) | Err(_)) {} return }
                Act::Close => return,
            }
            break;
        }
    }
}
fn answer(status: &str, headers: &str, body: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status}\r\n{headers}Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
}
fn good(index: u64, body: &str) -> Vec<u8> {
    answer("200 OK", &format!("X-Consul-Index: {index}\r\nX-Consul-KnownLeader: true\r\nX-Consul-LastContact: 0\r\n"), body)
}
fn entry(service: &str, id: &str, port: u16, dc: &str) -> String {
    format!(r#"{{"Node":{{"Node":"n","Address":"127.0.0.1","Datacenter":"{dc}"}},"Service":{{"ID":"{id}","Service":"{service}","Address":"127.0.0.1","Port":{port}}},"Checks":[]}}"#)
}
/// blocks while its index is the present one
fn block(r: &Req, index: u64, body: &str) -> Act {
    let a = Act::Send(good(index, body));
    if r.index() == Some(index) { Act::After(r.wait(), Box::new(a)) } else { a }
}
async fn backend() -> u16 { backend_task().await.0 }
async fn backend_task() -> (u16, tokio::task::JoinHandle<()>) {
    let l = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = l.local_addr().unwrap().port();
    let (_r, health) = tonic_health::server::health_reporter();
    let h = tokio::spawn(async move { let _ = Server::builder().add_service(health).serve_with_incoming(TcpIncoming::from(l)).await; });
    (port, h)
}
async fn call(c: &GrpcClient, ms: u64) -> Result<(), tonic::Status> {
    let mut r = Request::new(HealthCheckRequest::default());
    r.set_timeout(Duration::from_millis(ms));
    HealthClient::new(c.channel()).check(r).await.map(drop)
}
fn watch(c: &GrpcClient, tag: &'static str) {
    let mut e = c.events();
    let t0 = Instant::now();
    tokio::spawn(async move { while let Some(e) = e.next().await { println!("[{tag} {:7.3}] {e}", t0.elapsed().as_secs_f64()); } });
}
fn fds() -> usize { std::fs::read_dir("/proc/self/fd").unwrap().count() }
fn socks() -> usize { std::fs::read_dir("/proc/self/fd").unwrap().flatten().filter(|e| std::fs::read_link(e.path()).is_ok_and(|l| l.to_string_lossy().starts_with("socket"))).count() }
fn rss() -> u64 { std::fs::read_to_string("/proc/self/statm").unwrap().split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4 }

// --- the list of datacenters is short for the first seconds (an agent that has not joined the WAN yet)
async fn dc_short() {
    let p = backend().await;
    let raw = Raw::start(move |r| {
        if r.has("catalog/datacenters") { return Act::Send(good(1, if r.at < Duration::from_secs(2) { r#"["dc1"]"# } else { r#"["dc1","dc2"]"# })); }
        if r.has("acl/authorize") { return Act::Send(answer("401 Unauthorized", "", "ACL support disabled")); }
        if r.has("dc=dc2") { return block(r, 7, &format!("[{}]", entry("counter", "c2", p, "dc2"))); }
        block(r, 7, "[]")
    }).await;
    let s = ConsulService::builder(ConsulConfig::new(&raw.url()).unwrap()).service(ServiceOptions::new("counter")).fallback(Fallback::nearest()).build().unwrap();
    let c = s.grpc_client("counter").unwrap(); watch(&c, "dc_short");
    let t0 = Instant::now();
    let mut failed = 0;
    while t0.elapsed() < Duration::from_secs(90) {
        match call(&c, 2000).await { Ok(()) => { println!("dc_short: first call served after {:?}, {failed} calls failed before; list asked {} times", t0.elapsed(), raw.count(|r| r.has("catalog/datacenters"))); return }
            Err(e) => { failed += 1; if failed < 3 { println!("dc_short: {e}"); } sleep(Duration::from_millis(100)).await } }
    }
    println!("dc_short: NOT served in 90 s, {failed} failed, list asked {}", raw.count(|r| r.has("catalog/datacenters")));
}
// --- bound in dc2 by fallback (long ago); the one instance drops its connection once, while the agent's list is short for 3 s
async fn dc_vanish(keep_warm: bool) {
    let (p1, h1) = backend_task().await;
    let p2 = backend().await;
    let short = Arc::new(AtomicBool::new(false));
    let empty1 = Arc::new(AtomicBool::new(false));
    let (sh, em) = (short.clone(), empty1.clone());
    let raw = Raw::start(move |r| {
        if r.has("catalog/datacenters") { return Act::Send(good(1, if sh.load(SeqCst) { r#"["dc1"]"# } else { r#"["dc1","dc2"]"# })); }
        if r.has("acl/authorize") { return Act::Send(answer("401 Unauthorized", "", "ACL support disabled")); }
        if r.has("dc=dc2") { return block(r, 7, &format!("[{}]", entry("counter", "c2", p2, "dc2"))); }
        if em.load(SeqCst) { block(r, 8, "[]") } else { block(r, 7, &format!("[{}]", entry("counter", "c1", p1, "dc1"))) }
    }).await;
    let s = ConsulService::builder(ConsulConfig::new(&raw.url()).unwrap()).service(ServiceOptions::new("counter")).fallback(Fallback::nearest()).keep_warm(keep_warm).wait(Duration::from_secs(3)).build().unwrap();
    let c = s.grpc_client("counter").unwrap(); watch(&c, "dc_vanish");
    call(&c, 5000).await.unwrap();
    sleep(Duration::from_secs(63)).await;
    println!("dc_vanish: {}  known per dc {:?}", c.status(), c.status().datacenters.iter().map(|d| (d.name.clone(), d.known, d.ready)).collect::<Vec<_>>());
    // the agent was restarted and has not rejoined the WAN
    short.store(true, SeqCst);
    let _ = s.update_grpc_client("counter").await;
    sleep(Duration::from_secs(2)).await;
    println!("dc_vanish: short: known per dc {:?}", c.status().datacenters.iter().map(|d| (d.name.clone(), d.known, d.ready)).collect::<Vec<_>>());
    short.store(false, SeqCst);
    // some seconds later the own instance dies
    sleep(Duration::from_secs(2)).await;
    h1.abort();
    empty1.store(true, SeqCst);
    let t0 = Instant::now(); let mut failed = 0;
    // the aborted server's connections go on: end them by making the list empty is not enough; count calls served by whom
    while t0.elapsed() < Duration::from_secs(80) {
        match call(&c, 2000).await { Ok(()) => { if c.status().bound.as_ref().is_some_and(|i| i.name == "c2") { println!("dc_vanish: served by c2 after {:?}, {failed} failed", t0.elapsed()); return } sleep(Duration::from_millis(200)).await }
            Err(e) => { failed += 1; if failed < 3 { println!("dc_vanish: {e}"); } sleep(Duration::from_millis(100)).await } }
    }
    println!("dc_vanish: c2 not used for 80 s, {failed} failed; {}", c.status());
}
// --- a datacenter that hangs, and many services
async fn hung_dc(n: usize) {
    let p = backend().await;
    let raw = Raw::start(move |r| {
        if r.has("catalog/datacenters") { return Act::Send(good(1, r#"["dc1","dc2","dc3"]"#)); }
        if r.has("acl/authorize") { return Act::Send(answer("401 Unauthorized", "", "ACL support disabled")); }
        if r.has("dc=dc2") { return Act::Hang; }
        if r.has("dc=dc3") { return block(r, 7, &format!("[{}]", entry(&r.service(), "c3", p, "dc3"))); }
        block(r, 7, "[]")
    }).await;
    let mut b = ConsulService::builder(ConsulConfig::new(&raw.url()).unwrap()).fallback(Fallback::datacenters(["dc2", "dc3"]));
    for i in 0..n { b = b.service(ServiceOptions::new(format!("s{i}"))); }
    let s = b.build().unwrap();
    let t0 = Instant::now();
    let mut js = tokio::task::JoinSet::new();
    for i in 0..n {
        let c = s.grpc_client(&format!("s{i}")).unwrap();
        js.spawn(async move { let mut failed = 0; let mut last = String::new(); loop { match call(&c, 2000).await { Ok(()) => return (t0.elapsed(), failed, last), Err(e) => { last = e.to_string(); failed += 1; if t0.elapsed() > Duration::from_secs(120) { return (t0.elapsed(), failed, last) } } } } });
    }
    let mut all = Vec::new(); while let Some(r) = js.join_next().await { all.push(r.unwrap()); }
    all.sort();
    let failed: usize = all.iter().map(|x| x.1).sum();
    println!("hung_dc {n}: first {:?} median {:?} last {:?}; failed calls {failed}; e.g. {}", all[0].0, all[n / 2].0, all[n - 1].0, all[n - 1].2);
}
// --- the same with everything well in dc1, dc2 kept warm and hanging: what of dc1?
async fn hung_warm(n: usize, second: bool) {
    let p = backend().await;
    let cut = Arc::new(AtomicBool::new(false)); let ct = cut.clone();
    let raw = Raw::start(move |r| {
        if r.has("catalog/datacenters") { return Act::Send(good(1, r#"["dc1","dc2"]"#)); }
        if r.has("acl/authorize") { return Act::Send(answer("401 Unauthorized", "", "ACL support disabled")); }
        if r.has("dc=dc2") { return Act::Hang; }
        if ct.load(SeqCst) { return Act::Close; }
        block(r, 7, &format!("[{}]", entry(&r.service(), "c1", p, "dc1")))
    }).await;
    let mut cfg = ConsulConfig::new(&raw.url()).unwrap();
    let raw2 = Raw::start(move |r| {
        if r.has("catalog/datacenters") { return Act::Send(good(1, r#"["dc1","dc2"]"#)); }
        if r.has("acl/authorize") { return Act::Send(answer("401 Unauthorized", "", "ACL support disabled")); }
        if r.has("dc=dc2") { return Act::Hang; }
        block(r, 7, &format!("[{}]", entry(&r.service(), "c1", p, "dc1")))
    }).await;
    if second { cfg = cfg.more_agents([raw2.url()]).unwrap(); }
    let mut b = ConsulService::builder(cfg).fallback(Fallback::datacenters(["dc2"])).keep_warm(true).wait(Duration::from_secs(5));
    for i in 0..n { b = b.service(ServiceOptions::new(format!("s{i}"))); }
    let s = b.build().unwrap();
    let t0 = Instant::now();
    let mut js = tokio::task::JoinSet::new();
    for i in 0..n { let c = s.grpc_client(&format!("s{i}")).unwrap(); js.spawn(async move { let mut f = 0; while let Err(e) = call(&c, 2000).await { if f == 0 && i % 10 == 0 { println!("hung_warm s{i}: {e:.200}") } f += 1 } (t0.elapsed(), f) }); }
    let mut all = Vec::new(); while let Some(r) = js.join_next().await { all.push(r.unwrap()) } all.sort();
    println!("hung_warm {n}: own datacenter well: median {:?} last {:?}, {} calls failed", all[n / 2].0, all[n - 1].0, all.iter().map(|x| x.1).sum::<i32>());
    println!("hung_warm {n}: all served after {:?}", t0.elapsed());
    let c = s.grpc_client("s0").unwrap(); watch(&c, "hung_warm s0");
    sleep(Duration::from_secs(12)).await;
    for _ in 0..3 { let t = Instant::now(); let r = s.update_grpc_client("s0").await; println!("hung_warm {n}: update_grpc_client took {:?} {:?}", t.elapsed(), r.map(|b| b.generation()).map_err(|e| e.to_string())); sleep(Duration::from_millis(300)).await }
    // dc1's agent is away for a second
    cut.store(true, SeqCst); sleep(Duration::from_secs(6)).await; cut.store(false, SeqCst);
    let t = Instant::now();
    let mut worst = 0;
    while t.elapsed() < Duration::from_secs(60) {
        let stale = (0..n).filter(|i| s.grpc_client(&format!("s{i}")).unwrap().status().datacenters[0].stale_since.is_some()).count();
        worst = worst.max(stale);
        if stale == 0 { break }
        sleep(Duration::from_millis(100)).await;
    }
    println!("hung_warm {n}: own datacenter well, all services fresh after {:?} (worst {worst}); s0: {}", t.elapsed(), c.status());
}
// --- token exchanged while a blocking query waits; then a proxy repeats the old one
async fn token_leak() {
    let p = backend().await;
    let file = std::env::temp_dir().join(format!("tok{}", std::process::id()));
    const OLD: &str = "0ld-secret-0ld-secret"; const NEW: &str = "new-secret-new-secret";
    std::fs::write(&file, OLD).unwrap();
    let raw = Raw::start(move |r| {
        if r.has("acl/authorize") { return Act::Send(answer("401 Unauthorized", "", "ACL support disabled")); }
        if r.blocking() && r.head.contains(OLD) {
            // a proxy that shows what it was sent, after the wait
            return Act::After(Duration::from_secs(2), Box::new(Act::Send(good(8, &format!("{:?}", format!("debug: x-consul-token={OLD}"))))));
        }
        block(r, 7, &format!("[{}]", entry("counter", "c1", p, "dc1")))
    }).await;
    let s = ConsulService::builder(ConsulConfig::new(&raw.url()).unwrap().token_file(&file)).service(ServiceOptions::new("counter")).wait(Duration::from_secs(20)).build().unwrap();
    let c = s.grpc_client("counter").unwrap(); watch(&c, "token");
    call(&c, 5000).await.unwrap();
    sleep(Duration::from_millis(500)).await;
    std::fs::write(&file, NEW).unwrap();
    let _ = s.update_grpc_client("counter").await; // reads the file
    for _ in 0..60 { sleep(Duration::from_millis(50)).await; let l = c.status().to_string(); if l.contains(OLD) { println!("token_leak: LEAK in Status: {l}"); return } }
    println!("token_leak: no leak: {}", c.status());
}
// --- 200 with a list of something else
async fn shapeless() {
    for odd in [r#"[{"error":"upstream unavailable","code":503}]"#, "[null]", "[[]]", r#"["dc1","dc2"]"#, "[1,2]"] {
        let (p1, p2) = (backend().await, backend().await);
        let bad = Arc::new(AtomicBool::new(false)); let bd = bad.clone();
        let raw = Raw::start(move |r| {
            if r.has("catalog/datacenters") { return Act::Send(good(1, r#"["dc1","dc2"]"#)); }
            if r.has("acl/authorize") { return Act::Send(answer("401 Unauthorized", "", "ACL support disabled")); }
            if r.has("dc=dc2") { return block(r, 7, &format!("[{}]", entry("counter", "c2", p2, "dc2"))); }
            if bd.load(SeqCst) { return block(r, 8, odd); }
            if r.blocking() { return Act::After(Duration::from_millis(700), Box::new(Act::Send(good(7, &format!("[{}]", entry("counter", "c1", p1, "dc1")))))); }
            block(r, 7, &format!("[{}]", entry("counter", "c1", p1, "dc1")))
        }).await;
        let s = ConsulService::builder(ConsulConfig::new(&raw.url()).unwrap()).service(ServiceOptions::new("counter")).fallback(Fallback::nearest()).wait(Duration::from_secs(2)).build().unwrap();
        let c = s.grpc_client("counter").unwrap();
        call(&c, 5000).await.unwrap();
        bad.store(true, SeqCst);
        sleep(Duration::from_secs(4)).await;
        println!("shapeless {odd}: after 4 s: {}", c.status());
        sleep(Duration::from_secs(4)).await;
        println!("shapeless {odd}: after 8 s: {} | error {:?} stale {:?}", c.status(), c.status().datacenters[0].registry_error, c.status().datacenters[0].stale_since.is_some());
    }
}
// --- Retry-After kept by everything?
async fn manners() {
    let flood = Arc::new(AtomicBool::new(false)); let fl = flood.clone();
    let raw = Raw::start(move |r| {
        if fl.load(SeqCst) { return Act::Send(answer("429 Too Many Requests", "Retry-After: 60\r\n", "slow down")); }
        if r.has("catalog/datacenters") { return Act::Send(good(1, r#"["dc1","dc2"]"#)); }
        if r.has("acl/authorize") { return Act::Send(answer("401 Unauthorized", "", "ACL support disabled")); }
        block(r, 7, "[]")
    }).await;
    flood.store(true, SeqCst);
    let mut b = ConsulService::builder(ConsulConfig::new(&raw.url()).unwrap()).fallback(Fallback::nearest());
    for i in 0..20 { b = b.service(ServiceOptions::new(format!("s{i}"))); }
    let s = b.build().unwrap();
    for i in 0..20 { let c = s.grpc_client(&format!("s{i}")).unwrap(); tokio::spawn(async move { loop { let _ = call(&c, 1000).await; sleep(Duration::from_millis(100)).await } }); }
    sleep(Duration::from_secs(20)).await;
    println!("manners: 20 s after 429 with Retry-After 60, 20 services: {} health, {} datacenters, {} others; after the first second: {} / {}", raw.count(|r| r.has("/health/")), raw.count(|r| r.has("catalog/")), raw.count(|r| !r.has("/health/") && !r.has("catalog/")),
        raw.count(|r| r.has("/health/") && r.at > Duration::from_secs(2)), raw.count(|r| r.has("catalog/") && r.at > Duration::from_secs(2)));
}
// --- no index at all / index jumping up and down / index huge
async fn indexes() {
    for mode in ["none", "updown", "max", "negative", "moves", "dup", "same"] {
        let p = backend().await; let n = AtomicU64::new(0);
        let raw = Raw::start(move |r| {
            if r.has("acl/authorize") { return Act::Send(answer("401 Unauthorized", "", "ACL support disabled")); }
            let i = n.fetch_add(1, SeqCst);
            let h = match mode { "none" => String::new(), "updown" => format!("X-Consul-Index: {}\r\n", if i % 2 == 0 { 100 } else { 50 }), "max" => format!("X-Consul-Index: {}\r\n", u64::MAX), "negative" => "X-Consul-Index: -5\r\n".into(), "moves" => format!("X-Consul-Index: {}\r\n", 10 + i), "dup" => "X-Consul-Index: 5\r\nX-Consul-Index: 9\r\n".into(), _ => "X-Consul-Index: 5\r\n".into() };
            let _ = r;
            Act::Send(answer("200 OK", &format!("{h}X-Consul-KnownLeader: true\r\nX-Consul-LastContact: 0\r\n"), &format!("[{}]", entry("counter", "c1", p, "dc1"))))
        }).await;
        let s = ConsulService::builder(ConsulConfig::new(&raw.url()).unwrap()).service(ServiceOptions::new("counter")).build().unwrap();
        let c = s.grpc_client("counter").unwrap();
        call(&c, 5000).await.unwrap();
        sleep(Duration::from_secs(10)).await;
        println!("indexes {mode}: {} requests in 10 s, {} in the last 4 s; {}", raw.count(|_| true), raw.count(|r| r.at > Duration::from_secs(6)), c.status());
    }
}
// --- a keep-alive connection that is closed as the second request comes
async fn keepalive(most: usize) {
    let p = backend().await;
    let raw = Raw::start(move |r| {
        if r.has("acl/authorize") { return Act::Send(answer("401 Unauthorized", "", "ACL support disabled")); }
        if r.nth > most { return Act::Close; }
        block(r, 7, &format!("[{}]", entry("counter", "c1", p, "dc1")))
    }).await;
    let s = ConsulService::builder(ConsulConfig::new(&raw.url()).unwrap()).service(ServiceOptions::new("counter")).wait(Duration::from_secs(2)).build().unwrap();
    let c = s.grpc_client("counter").unwrap(); watch(&c, "keepalive");
    call(&c, 5000).await.unwrap();
    let t = Instant::now(); let mut stale = 0; let mut n = 0;
    while t.elapsed() < Duration::from_secs(25) { n += 1; stale += usize::from(c.status().datacenters[0].stale_since.is_some()); sleep(Duration::from_millis(50)).await }
    println!("keepalive {most}: stale in {stale} of {n} looks; {} requests; {}", raw.count(|_| true), c.status());
}
// --- 10,000 instances, all but a few are dead
async fn many_instances(n: usize) {
    let p = backend().await; let v = Arc::new(AtomicU64::new(7)); let vv = v.clone();
    let body: Arc<Vec<String>> = Arc::new((0..2).map(|k| { let mut all: Vec<_> = (0..n).map(|i| format!(r#"{{"Node":{{"Node":"n{i}","Address":"127.{}.{}.{}","Datacenter":"dc1"}},"Service":{{"ID":"i{i}-{k}","Service":"counter","Address":"127.{}.{}.{}","Port":1}},"Checks":[]}}"#, i / 65536, i / 256 % 256, i % 256, i / 65536, i / 256 % 256, i % 256)).collect(); all.push(entry("counter", "good", p, "dc1")); format!("[{}]", all.join(",")) }).collect());
    println!("many {n}: {} bytes", body[0].len());
    let raw = Raw::start(move |r| {
        if r.has("acl/authorize") { return Act::Send(answer("401 Unauthorized", "", "ACL support disabled")); }
        let i = vv.load(SeqCst);
        block(r, i, &body[(i % 2) as usize])
    }).await;
    let s = ConsulService::builder(ConsulConfig::new(&raw.url()).unwrap()).service(ServiceOptions::new("counter")).wait(Duration::from_secs(2)).build().unwrap();
    let c = s.grpc_client("counter").unwrap();
    let t = Instant::now();
    let mut f = 0;
    while let Err(e) = call(&c, 2000).await { f += 1; if f == 1 { println!("many {n}: {e}"); } if t.elapsed() > Duration::from_secs(60) { break } }
    println!("many {n}: first served after {:?}, {f} failed with a 2 s deadline; {} rss {} KiB", t.elapsed(), c.status(), rss());
    // churn: index moves each half second
    tokio::spawn(async move { loop { sleep(Duration::from_millis(500)).await; v.fetch_add(1, SeqCst); } });
    let t = Instant::now(); let (mut worst, mut calls, mut failed) = (Duration::ZERO, 0, 0);
    while t.elapsed() < Duration::from_secs(15) { let t1 = Instant::now(); calls += 1; if call(&c, 2000).await.is_err() { failed += 1 } worst = worst.max(t1.elapsed()); sleep(Duration::from_millis(20)).await }
    println!("many {n}: churn: {calls} calls, {failed} failed, slowest {worst:?}; {} rss {}", c.status(), rss());
}
// --- two agents: the first cut off from the leader, the second well
async fn behind_first() {
    let (dead, p2) = (1, backend().await);
    let a = Raw::start(move |r| {
        if r.has("acl/authorize") { return Act::Send(answer("401 Unauthorized", "", "ACL support disabled")); }
        let x = Act::Send(answer("200 OK", "X-Consul-Index: 7\r\nX-Consul-KnownLeader: false\r\nX-Consul-LastContact: 60000\r\n", &format!("[{}]", entry("counter", "old", dead, "dc1"))));
        if r.index() == Some(7) { Act::After(r.wait(), Box::new(x)) } else { x }
    }).await;
    let b = Raw::start(move |r| { if r.has("acl/authorize") { return Act::Send(answer("401 Unauthorized", "", "ACL support disabled")); } block(r, 9, &format!("[{}]", entry("counter", "new", p2, "dc1"))) }).await;
    let cfg = ConsulConfig::new(&a.url()).unwrap().more_agents([b.url()]).unwrap();
    let s = ConsulService::builder(cfg).service(ServiceOptions::new("counter")).build().unwrap();
    let c = s.grpc_client("counter").unwrap(); watch(&c, "behind_first");
    let t = Instant::now(); let mut f = 0; let mut last = String::new();
    while t.elapsed() < Duration::from_secs(15) { match call(&c, 2000).await { Ok(()) => { println!("behind_first: served after {:?}", t.elapsed()); return } Err(e) => { f += 1; last = e.to_string() } } }
    println!("behind_first: NOT served in 15 s ({f} failed: {last}); agent A asked {}, agent B asked {}; {}", a.count(|_| true), b.count(|_| true), c.status());
}
// --- two agents: what the first says that is rubbish
async fn bad_first() {
    let p2 = backend().await;
    for (what, raw) in [("html", answer("200 OK", "", "<html>")), ("404", answer("404 Not Found", "", "x")), ("403", answer("403 Forbidden", "", "Permission denied")), ("429", answer("429 Too Many", "", "x")), ("500", answer("500 Internal", "", "No cluster leader")), ("500p", answer("500 Internal", "", "rpc error making call: panic")), ("301", answer("301 Moved", "Location: http://127.0.0.1:1/\r\n", "")), ("null", answer("200 OK", "", "null"))] {
        let a = Raw::start(move |_| Act::Send(raw.clone())).await;
        let b = Raw::start(move |r| block(r, 9, &format!("[{}]", entry("counter", "new", p2, "dc1")))).await;
        let cfg = ConsulConfig::new(&a.url()).unwrap().more_agents([b.url()]).unwrap();
        let s = ConsulService::builder(cfg).service(ServiceOptions::new("counter")).build().unwrap();
        let c = s.grpc_client("counter").unwrap();
        let r = call(&c, 5000).await;
        println!("bad_first {what}: {:?}; A {} B {}", r.map_err(|e| e.to_string()), a.count(|_| true), b.count(|_| true));
    }
}
// --- raw odd answers to one question
async fn odd() {
    let list = format!("[{}]", entry("counter", "c", 1, "dc1"));
    let cases: Vec<(&str, Box<dyn Fn() -> Act + Send + Sync>)> = vec![
        ("100-continue", { let l = list.clone(); Box::new(move || { let mut v = b"HTTP/1.1 100 Continue\r\n\r\n".to_vec(); v.extend(good(5, &l)); Act::Send(v) }) }),
        ("103-early", { let l = list.clone(); Box::new(move || { let mut v = b"HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n".to_vec(); v.extend(good(5, &l)); Act::Send(v) }) }),
        ("101", Box::new(|| Act::Send(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n".to_vec()))),
        ("204", Box::new(|| Act::Send(b"HTTP/1.1 204 No Content\r\n\r\n".to_vec()))),
        ("301", Box::new(|| Act::Send(b"HTTP/1.1 301 Moved\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n".to_vec()))),
        ("http10", { let l = list.clone(); Box::new(move || Act::SendClose(format!("HTTP/1.0 200 OK\r\n\r\n{l}").into_bytes())) }),
        ("http10cut", { let l = list.clone(); Box::new(move || Act::SendClose(format!("HTTP/1.0 200 OK\r\n\r\n{}", &l[..50]).into_bytes())) }),
        ("gzip", Box::new(|| Act::Send(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\x00".to_vec()))),
        ("two lengths", Box::new(|| Act::Send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n[]x".to_vec()))),
        ("bad chunk", Box::new(|| Act::Send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n[]\r\n0\r\n\r\n".to_vec()))),
        ("huge chunk", Box::new(|| Act::Send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n[]\r\n".to_vec()))),
        ("cut chunk", Box::new(|| Act::SendClose(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n[]\r\n".to_vec()))),
        ("cut length", Box::new(|| Act::SendClose(b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n[]".to_vec()))),
        ("garbage", Box::new(|| Act::SendClose(b"\x16\x03\x01garbage\r\n\r\n".to_vec()))),
        ("200 headers", Box::new(|| { let mut v = b"HTTP/1.1 200 OK\r\n".to_vec(); for i in 0..200 { v.extend(format!("H{i}: x\r\n").bytes()) } v.extend(b"Content-Length: 2\r\n\r\n[]"); Act::Send(v) })),
        ("dribbled head", Box::new(|| Act::Dribble(b"HTTP/1.1 200 OK\r\n".to_vec(), b"X-A: b\r\n".to_vec(), Duration::from_millis(100)))),
        ("dribbled body", Box::new(|| Act::Dribble(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n[\r\n".to_vec(), b"1\r\n \r\n".to_vec(), Duration::from_millis(100)))),
        ("dribbled 403", Box::new(|| Act::Dribble(b"HTTP/1.1 403 Forbidden\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nno\r\n".to_vec(), b"1\r\n \r\n".to_vec(), Duration::from_millis(100)))),
        ("dribbled 429", Box::new(|| Act::Dribble(b"HTTP/1.1 429 Slow\r\nRetry-After: 60\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nno\r\n".to_vec(), b"1\r\n \r\n".to_vec(), Duration::from_millis(100)))),
        ("retry-after max", Box::new(|| Act::Send(answer("429 x", &format!("Retry-After: {}\r\n", u64::MAX), "x")))),
        ("retry-after date", Box::new(|| Act::Send(answer("429 x", "Retry-After: Wed, 21 Oct 2026 07:28:00 GMT\r\n", "x")))),
        ("503 date", Box::new(|| Act::Send(answer("503 x", "Retry-After: Wed, 21 Oct 2026 07:28:00 GMT\r\n", "x")))),
        ("bom", Box::new(|| Act::Send(good(3, "\u{feff}[]")))),
        ("null", Box::new(|| Act::Send(good(3, "null")))),
        ("trailing", Box::new(|| Act::Send(good(3, "[] []")))),
        ("contact max", { let l = list.clone(); Box::new(move || Act::Send(answer("200 OK", &format!("X-Consul-Index: 3\r\nX-Consul-KnownLeader: true\r\nX-Consul-LastContact: {}\r\n", u64::MAX), &l))) }),
        ("deep", Box::new(|| Act::Send(good(3, &format!("[{}", "[".repeat(100_000)))))),
    ];
    for (what, f) in cases {
        let raw = Raw::start(move |_| f()).await;
        let cc = ConsulClient::new(ConsulConfig::new(&raw.url()).unwrap().request_timeout(Duration::from_secs(1))).unwrap();
        let t = Instant::now();
        let r = timeout(Duration::from_secs(10), cc.healthy_instances(&HealthQuery::new("counter").unwrap())).await;
        let text = match r { Err(_) => "NO END".to_owned(), Ok(Ok(a)) => format!("ok {} index {:?} skipped {}", a.snapshot.instances.len(), a.index, a.skipped.len()), Ok(Err(e)) => format!("{e:?}") };
        println!("odd {what}: {:?} {:.200}", t.elapsed(), text);
    }
}
// --- the list alternates between two halves with every answer
async fn halves() {
    let mut ports = Vec::new(); for _ in 0..6 { ports.push(backend().await) }
    let n = AtomicU64::new(10);
    let raw = Raw::start(move |r| {
        if r.has("acl/authorize") { return Act::Send(answer("401 Unauthorized", "", "ACL support disabled")); }
        let i = n.fetch_add(1, SeqCst);
        let half: Vec<_> = (0..3).map(|k| { let k = k + 3 * (i as usize % 2); entry("counter", &format!("i{k}"), ports[k], "dc1") }).collect();
        Act::Send(good(i, &format!("[{}]", half.join(","))))
    }).await;
    let s = ConsulService::builder(ConsulConfig::new(&raw.url()).unwrap()).service(ServiceOptions::new("counter")).build().unwrap();
    let c = s.grpc_client("counter").unwrap();
    call(&c, 5000).await.unwrap();
    let f0 = socks();
    let t = Instant::now(); let (mut calls, mut failed, mut worst) = (0, Vec::new(), Duration::ZERO);
    while t.elapsed() < Duration::from_secs(20) { let t1 = Instant::now(); calls += 1; if let Err(e) = call(&c, 2000).await { failed.push(e.to_string()) } worst = worst.max(t1.elapsed()); sleep(Duration::from_millis(5)).await }
    println!("halves: {calls} calls, {} failed {:?}, slowest {worst:?}, sockets {f0} -> {}, {} answers", failed.len(), failed.first(), socks(), raw.count(|_| true));
}
// --- fault cycles: memory and sockets
async fn cycles(n: usize) {
    let agent = Agent::start("dc1").await.unwrap();
    for i in 0..2 { agent.registry().register(&Registration::new("counter", &format!("c{i}"), "127.0.0.1", backend().await)).await.unwrap(); }
    let s = ConsulService::builder(ConsulConfig::new(&agent.url()).unwrap()).service(ServiceOptions::new("counter")).wait(Duration::from_secs(1)).build().unwrap();
    let c = s.grpc_client("counter").unwrap();
    c.ready().await.unwrap();
    let mut failed = 0;
    for i in 0..n {
        let f = match i % 4 { 0 => agent.faults().refuse(), 1 => agent.faults().drop_connections(), 2 => agent.faults().garbage(), _ => agent.faults().empty("counter") };
        for _ in 0..3 { failed += usize::from(call(&c, 2000).await.is_err()); let _ = timeout(Duration::from_millis(30), s.update_grpc_client("counter")).await; sleep(Duration::from_millis(10)).await }
        f.off();
        let _ = timeout(Duration::from_millis(300), s.update_grpc_client("counter")).await;
        if i % 100 == 0 { println!("cycles {i}: rss {} KiB, fds {}, sockets {}, failed {failed}, gen {}", rss(), fds(), socks(), c.binding().generation()); }
    }
    println!("cycles: rss {} fds {} failed {failed} {}", rss(), fds(), c.status());
    s.shutdown().await; sleep(Duration::from_millis(500)).await; println!("cycles: after shutdown sockets {}", socks());
}
// --- the list of datacenters is short at first; then the service is scaled to nothing here while its process still answers
async fn dc_never() {
    let (p1, p2) = (backend().await, backend().await);
    let raw = Raw::start(move |r| {
        if r.has("catalog/datacenters") { return Act::Send(good(1, if r.at < Duration::from_secs(6) { r#"["dc1"]"# } else { r#"["dc1","dc2"]"# })); }
        if r.has("acl/authorize") { return Act::Send(answer("401 Unauthorized", "", "ACL support disabled")); }
        if r.has("dc=dc2") { return block(r, 7, &format!("[{}]", entry("counter", "c2", p2, "dc2"))); }
        if r.at > Duration::from_secs(1) { return block(r, 8, "[]") }
        if r.blocking() { return Act::After(Duration::from_secs(1), Box::new(Act::Send(good(8, "[]")))) }
        block(r, 7, &format!("[{}]", entry("counter", "c1", p1, "dc1")))
    }).await;
    let s = ConsulService::builder(ConsulConfig::new(&raw.url()).unwrap()).service(ServiceOptions::new("counter")).fallback(Fallback::nearest()).build().unwrap();
    let c = s.grpc_client("counter").unwrap(); watch(&c, "dc_never");
    let t0 = Instant::now();
    while t0.elapsed() < Duration::from_secs(240) {
        if let Err(e) = call(&c, 2000).await { println!("dc_never: {e:.200}") }
        if c.status().bound.as_ref().is_some_and(|i| i.name == "c2") { println!("dc_never: moved to dc2 after {:?}", t0.elapsed()); return }
        sleep(Duration::from_millis(200)).await;
    }
    println!("dc_never: still not in dc2 after {:?}; list asked at {:?}; {}", t0.elapsed(), raw.log.lock().unwrap().iter().filter(|r| r.has("catalog/")).map(|r| r.at).collect::<Vec<_>>(), c.status());
}
// --- two agents that disagree, and fail in turn
async fn disagree() {
    let (p1, p2) = (backend().await, backend().await);
    let mk = |p: u16, name: &'static str, odd: bool| Raw::start(move |r| {
        if r.has("acl/authorize") { return Act::Send(answer("401 Unauthorized", "", "ACL support disabled")); }
        if (r.at.as_millis() / 700 % 2 == 0) == odd { return Act::Close }
        block(r, if odd { 100 } else { 50 }, &format!("[{}]", entry("counter", name, p, "dc1")))
    });
    let (a, b) = (mk(p1, "a", true).await, mk(p2, "b", false).await);
    let s = ConsulService::builder(ConsulConfig::new(&a.url()).unwrap().more_agents([b.url()]).unwrap()).service(ServiceOptions::new("counter")).wait(Duration::from_secs(1)).build().unwrap();
    let c = s.grpc_client("counter").unwrap(); watch(&c, "disagree");
    let _ = call(&c, 5000).await;
    let t = Instant::now(); let (mut calls, mut failed, mut worst, s0) = (0, Vec::new(), Duration::ZERO, socks());
    while t.elapsed() < Duration::from_secs(20) { let t1 = Instant::now(); calls += 1; if let Err(e) = call(&c, 2000).await { failed.push(e.to_string()) } worst = worst.max(t1.elapsed()); sleep(Duration::from_millis(10)).await }
    println!("disagree: {calls} calls, {} failed {:?} slowest {worst:?}; sockets {s0} -> {}; A {} B {}; {}", failed.len(), failed.first(), socks(), a.count(|_| true), b.count(|_| true), c.status());
}
// --- ten thousand that are all well, listed anew again and again
async fn many_good(n: usize) {
    let l = TcpListener::bind("0.0.0.0:0").await.unwrap(); let p = l.local_addr().unwrap().port();
    std::thread::spawn(move || { let l = l.into_std().unwrap(); tokio::runtime::Runtime::new().unwrap().block_on(async { let l = TcpListener::from_std(l).unwrap(); let (_r, h) = tonic_health::server::health_reporter(); let _ = Server::builder().add_service(h).serve_with_incoming(TcpIncoming::from(l)).await; }) });
    let body: Arc<Vec<String>> = Arc::new((0..2).map(|k| { let all: Vec<_> = (0..n).map(|i| format!(r#"{{"Node":{{"Node":"n{i}","Address":"127.1.{}.{}","Datacenter":"dc1"}},"Service":{{"ID":"i{i}","Service":"counter","Address":"127.1.{}.{}","Port":{p},"Meta":{{"v":"{k}"}}}},"Checks":[]}}"#, i / 250, i % 250 + 1, i / 250, i % 250 + 1)).collect(); format!("[{}]", all.join(",")) }).collect());
    let v = AtomicU64::new(7);
    let raw = Raw::start(move |r| { if r.has("acl/authorize") { return Act::Send(answer("401 Unauthorized", "", "ACL support disabled")); } let i = v.fetch_add(1, SeqCst); Act::Send(good(i, &body[(i % 2) as usize])) }).await;
    let s = ConsulService::builder(ConsulConfig::new(&raw.url()).unwrap()).service(ServiceOptions::new("counter")).build().unwrap();
    let c = s.grpc_client("counter").unwrap();
    let t = Instant::now(); while call(&c, 2000).await.is_err() {} println!("many_good {n}: first {:?}", t.elapsed());
    let t = Instant::now(); let (mut calls, mut failed, mut worst) = (0, 0, Duration::ZERO);
    while t.elapsed() < Duration::from_secs(15) { let t1 = Instant::now(); calls += 1; if call(&c, 2000).await.is_err() { failed += 1 } worst = worst.max(t1.elapsed()); sleep(Duration::from_millis(10)).await }
    println!("many_good {n}: {calls} calls, {failed} failed, slowest {worst:?}; {} answers; rss {} KiB", raw.count(|_| true), rss());
}
// --- few connections are left for 300 services that start
async fn limited(n: usize, most: usize) {
    let agent = Agent::start("dc1").await.unwrap();
    let p = backend().await;
    for i in 0..n { agent.registry().register(&Registration::new(&format!("s{i}"), &format!("c{i}"), "127.0.0.1", p)).await.unwrap(); }
    let _f = agent.faults().limit_connections(most);
    let mut b = ConsulService::builder(ConsulConfig::new(&agent.url()).unwrap());
    for i in 0..n { b = b.service(ServiceOptions::new(format!("s{i}"))); }
    let s = b.build().unwrap();
    let t0 = Instant::now();
    let mut js = tokio::task::JoinSet::new();
    for i in 0..n { let c = s.grpc_client(&format!("s{i}")).unwrap(); js.spawn(async move { let mut f = 0; let mut last = String::new(); loop { match call(&c, 2000).await { Ok(()) => return (t0.elapsed(), f, last), Err(e) => { last = format!("{e:.200}"); f += 1; if t0.elapsed() > Duration::from_secs(60) { return (t0.elapsed(), f, last) } } } } }); }
    let mut all = Vec::new(); while let Some(r) = js.join_next().await { all.push(r.unwrap()) } all.sort();
    println!("limited {n} with {most}: median {:?} last {:?}, {} calls failed; {}", all[n / 2].0, all[n - 1].0, all.iter().map(|x| x.1).sum::<i32>(), all[n - 1].2);
    sleep(Duration::from_secs(10)).await;
    let stale = (0..n).filter(|i| s.grpc_client(&format!("s{i}")).unwrap().status().datacenters[0].stale_since.is_some()).count();
    println!("limited {n} with {most}: {stale} stale 10 s later");
}
// --- a proxy that drops the index and closes connections that have been idle for so long
async fn idle(ms: u64) {
    let p = backend().await;
    let l = TcpListener::bind("127.0.0.1:0").await.unwrap(); let port = l.local_addr().unwrap().port();
    let reqs: Arc<AtomicUsize> = Arc::default(); let rq = reqs.clone();
    std::thread::spawn(move || { let l = l.into_std().unwrap(); tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async move { let l = TcpListener::from_std(l).unwrap(); while let Ok((mut s, _)) = l.accept().await { let rq = rq.clone(); tokio::spawn(async move { let mut b = [0; 8192]; loop { match timeout(Duration::from_millis(ms), s.read(&mut b)).await { Ok(Ok(n)) if n > 0 => { rq.fetch_add(1, SeqCst); if s.write_all(&good(5, &format!("[{}]", entry("counter", "c", p, "dc1")))).await.is_err() { return } } _ => return } } }); } }) });
    let s = ConsulService::builder(ConsulConfig::new(&format!("127.0.0.1:{port}")).unwrap()).service(ServiceOptions::new("counter")).build().unwrap();
    let c = s.grpc_client("counter").unwrap(); call(&c, 5000).await.unwrap();
    let mut e = c.events(); let lost = Arc::new(AtomicUsize::new(0)); let l2 = lost.clone();
    tokio::spawn(async move { while let Some(e) = e.next().await { if e.to_string().contains("does not answer") { l2.fetch_add(1, SeqCst); } } });
    let (mut n, mut stale) = (0, 0); let t = Instant::now();
    while t.elapsed() < Duration::from_secs(60) { n += 1; stale += usize::from(c.status().datacenters[0].stale_since.is_some()); sleep(Duration::from_millis(50)).await }
    println!("idle {ms}: {} losses told in 60 s, stale in {stale} of {n} looks; {} requests", lost.load(SeqCst), reqs.load(SeqCst));
}
// --- an endpoint that repeats the request's headers as a JSON list
async fn echo() {
    let raw = Raw::start(move |r| { let l: Vec<String> = r.head.lines().filter(|l| !l.is_empty()).map(|l| format!("{l:?}")).collect(); Act::Send(good(8, &format!("[{}]", l.join(",")))) }).await;
    let cfg = ConsulConfig::new(&raw.url()).unwrap().token("s3cret-s3cret").basic_auth("user:passw0rd");
    let a = ConsulClient::new(cfg.clone()).unwrap().healthy_instances(&HealthQuery::new("counter").unwrap()).await.unwrap();
    for s in &a.skipped { println!("echo: skipped: {s}"); }
    let s = ConsulService::builder(cfg).service(ServiceOptions::new("counter")).build().unwrap();
    sleep(Duration::from_millis(2500)).await; println!("echo: {}", s.grpc_client("counter").unwrap().status());
}
// --- names in the datacenters' list, entry fields
async fn names() {
    let raw = Raw::start(move |r| {
        if r.has("catalog/datacenters") { return Act::Send(good(1, &format!("[\"dc1\",\"{}\",\"a\\u001b[2Jb\\nc\",\"\",\"../x?y#z&dc=dc1\"]", "x".repeat(100_000)))); }
        if r.has("acl/authorize") { return Act::Send(answer("401 Unauthorized", "", "ACL support disabled")); }
        if r.has("passing&dc") && !r.has("dc=dc1&") { return Act::Send(answer("500 x", "", "No path to datacenter")); }
        block(r, 7, "[]")
    }).await;
    let s = ConsulService::builder(ConsulConfig::new(&raw.url()).unwrap()).service(ServiceOptions::new("counter")).fallback(Fallback::nearest()).build().unwrap();
    let c = s.grpc_client("counter").unwrap();
    let mut e = c.events(); tokio::spawn(async move { while let Some(e) = e.next().await { let e = e.to_string(); println!("names event: {:.300?} ({} bytes)", e, e.len()); } });
    let r = call(&c, 2000).await; let m = r.unwrap_err().message().to_owned(); println!("names: message of {} bytes {:.100?}", m.len(), m);
    println!("names: status of {} bytes, control characters {}", c.status().to_string().len(), c.status().to_string().chars().any(char::is_control));
    for r in raw.log.lock().unwrap().iter().take(12) { println!("names asked: {:.120}", r.path); }
}
// --- the datacenters are given, the agent does not tell them
async fn no_list() {
    for what in ["403", "404", "hang", "ok"] {
        let p = backend().await;
        let raw = Raw::start(move |r| {
            if r.has("catalog/datacenters") { return match what { "hang" => Act::Hang, "403" => Act::Send(answer("403 Forbidden", "", "not here")), "404" => Act::Send(answer("404 x", "", "")), _ => Act::Send(good(1, r#"["dc1","dc2"]"#)) }; }
            if r.has("acl/authorize") { return Act::Send(answer("401 Unauthorized", "", "ACL support disabled")); }
            if r.has("dc=dc2") { return block(r, 7, &format!("[{}]", entry("counter", "c2", p, "dc2"))); }
            block(r, 7, "[]")
        }).await;
        let s = ConsulService::builder(ConsulConfig::new(&raw.url()).unwrap()).service(ServiceOptions::new("counter")).fallback(Fallback::datacenters(["dc2"])).build().unwrap();
        let c = s.grpc_client("counter").unwrap();
        let t = Instant::now(); let mut f = 0;
        while call(&c, 2000).await.is_err() { f += 1; if t.elapsed() > Duration::from_secs(15) { break } }
        println!("no_list {what}: {:?}, {f} failed; dc2 asked {} times, list asked {}; {:.300}", t.elapsed(), raw.count(|r| r.has("dc=dc2")), raw.count(|r| r.has("catalog/")), c.status().to_string());
    }
}
// --- a real server without a leader, asked in the default mode
async fn leaderless(url: &str) {
    for mode in [tonic_failover::consul::Consistency::Stale, tonic_failover::consul::Consistency::Default, tonic_failover::consul::Consistency::Consistent] {
        let t = Instant::now();
        let r = ConsulClient::new(ConsulConfig::new(url).unwrap()).unwrap().healthy_instances(&HealthQuery::new("counter").unwrap().consistency(mode)).await;
        println!("leaderless {mode:?}: {:?} {:.200}", t.elapsed(), format!("{r:?}"));
    }
}
// --- a real Consul at 28500 with services s0..s299 on port 34567, whose connections are mostly others'
async fn real_limited(n: usize, hogs: usize) {
    let l = TcpListener::bind("127.0.0.1:34567").await.unwrap();
    let (_r, health) = tonic_health::server::health_reporter();
    tokio::spawn(async move { let _ = Server::builder().add_service(health).serve_with_incoming(TcpIncoming::from(l)).await; });
    let mut held = Vec::new(); for _ in 0..hogs { held.push(TcpStream::connect("127.0.0.1:28500").await.unwrap()) }
    for h in &mut held { h.write_all(b"GET /v1/health/service/none?index=1000000&wait=600s HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap(); }
    let mut b = ConsulService::builder(ConsulConfig::new("127.0.0.1:28500").unwrap());
    for i in 0..n { b = b.service(ServiceOptions::new(format!("s{i}"))); }
    let s = b.build().unwrap();
    let t0 = Instant::now();
    let mut js = tokio::task::JoinSet::new();
    for i in 0..n { let c = s.grpc_client(&format!("s{i}")).unwrap(); js.spawn(async move { let mut f = 0; let mut last = String::new(); loop { match call(&c, 2000).await { Ok(()) => return (t0.elapsed(), f, last), Err(e) => { last = format!("{e:.200}"); f += 1; if t0.elapsed() > Duration::from_secs(60) { return (t0.elapsed(), f, last) } } } } }); }
    let mut all = Vec::new(); while let Some(r) = js.join_next().await { all.push(r.unwrap()) } all.sort();
    println!("real_limited {n}, {hogs} taken: median {:?} last {:?}, {} calls failed; {:.300}", all[n / 2].0, all[n - 1].0, all.iter().map(|x| x.1).sum::<i32>(), all[n - 1].2);
    for _ in 0..4 { sleep(Duration::from_secs(5)).await;
    let stale = (0..n).filter(|i| s.grpc_client(&format!("s{i}")).unwrap().status().datacenters[0].stale_since.is_some()).count();
    println!("real_limited: {stale} stale"); }
}
// --- so many that accept and say nothing (or refuse), and one that answers
async fn silent(n: usize, refuse: bool) {
    let p = backend().await;
    let mut ports = Vec::new();
    for _ in 0..n {
        let l = TcpListener::bind("127.0.0.1:0").await.unwrap(); ports.push(l.local_addr().unwrap().port());
        if !refuse { tokio::spawn(async move { let mut held = Vec::new(); while let Ok((s, _)) = l.accept().await { held.push(s); if held.len() > 50 { held.remove(0); } } }); }
    }
    let asked: Arc<AtomicUsize> = Arc::default();
    let mut list: Vec<_> = ports.iter().enumerate().map(|(i, p)| entry("counter", &format!("x{i}"), *p, "dc1")).collect();
    list.push(entry("counter", "good", p, "dc1"));
    let body = format!("[{}]", list.join(","));
    let raw = Raw::start(move |r| { if r.has("acl/authorize") { return Act::Send(answer("401 Unauthorized", "", "ACL support disabled")); } block(r, 7, &body) }).await;
    let _ = asked;
    let mut js = tokio::task::JoinSet::new();
    // eight clients, each with its own order
    for k in 0..8 {
        let url = raw.url();
        js.spawn(async move {
            let s = ConsulService::builder(ConsulConfig::new(&url).unwrap()).service(ServiceOptions::new("counter")).build().unwrap();
            let c = s.grpc_client("counter").unwrap();
            let t = Instant::now(); let mut f = 0;
            while call(&c, 2000).await.is_err() { f += 1; if t.elapsed() > Duration::from_secs(60) { return format!("client {k}: NOT served in 60 s, {f} failed: {:.160}", c.status().to_string()) } }
            format!("client {k}: served after {:?}, {f} failed", t.elapsed())
        });
    }
    while let Some(r) = js.join_next().await { println!("silent {n} refuse={refuse}: {}", r.unwrap()); }
}
// --- bound and well; the list grows by so many that say nothing; then the one that answers drops its connections once
async fn silent_bound(n: usize) {
    let p = backend().await;
    let front = TcpListener::bind("127.0.0.1:0").await.unwrap(); let good_port = front.local_addr().unwrap().port();
    let (cut, _) = tokio::sync::broadcast::channel::<()>(4); let cut2 = cut.clone();
    let through = Arc::new(AtomicUsize::new(0)); let th = through.clone();
    tokio::spawn(async move { while let Ok((mut s, _)) = front.accept().await { th.fetch_add(1, SeqCst); let mut c = cut2.subscribe(); tokio::spawn(async move { let Ok(mut b) = TcpStream::connect(("127.0.0.1", p)).await else { return }; tokio::select! { _ = tokio::io::copy_bidirectional(&mut s, &mut b) => {}, _ = c.recv() => {} } }); } });
    let mut ports = Vec::new();
    for _ in 0..n { let l = TcpListener::bind("127.0.0.1:0").await.unwrap(); ports.push(l.local_addr().unwrap().port()); tokio::spawn(async move { let mut held = Vec::new(); while let Ok((s, _)) = l.accept().await { held.push(s); if held.len() > 50 { held.remove(0); } } }); }
    let mut list: Vec<_> = ports.iter().enumerate().map(|(i, p)| entry("counter", &format!("x{i}"), *p, "dc1")).collect();
    list.push(entry("counter", "good", good_port, "dc1"));
    let (small, large) = (format!("[{}]", list[n]), format!("[{}]", list.join(",")));
    let grown = Arc::new(AtomicBool::new(false)); let g = grown.clone();
    let raw = Raw::start(move |r| { if r.has("acl/authorize") { return Act::Send(answer("401 Unauthorized", "", "ACL support disabled")); } if g.load(SeqCst) { block(r, 8, &large) } else { block(r, 7, &small) } }).await;
    let mut cs = Vec::new();
    for _ in 0..8 { let s = ConsulService::builder(ConsulConfig::new(&raw.url()).unwrap()).service(ServiceOptions::new("counter")).wait(Duration::from_secs(1)).build().unwrap(); let c = s.grpc_client("counter").unwrap(); call(&c, 5000).await.unwrap(); cs.push((s, c)); }
    grown.store(true, SeqCst);
    sleep(Duration::from_secs(5)).await;
    for (_, c) in &cs { println!("silent_bound {n}: {:?} {}", call(c, 2000).await.is_ok(), c.status()); }
    let before = through.load(SeqCst);
    let _ = cut.send(());
    let mut js = tokio::task::JoinSet::new();
    for (k, (s, c)) in cs.into_iter().enumerate() { js.spawn(async move { let _s = s; sleep(Duration::from_millis(50)).await; let t = Instant::now(); let mut f = 0; loop { match call(&c, 2000).await { Ok(()) => return format!("client {k}: served again after {:?}, {f} calls with 2 s failed", t.elapsed()), Err(_) => f += 1 } if t.elapsed() > Duration::from_secs(60) { return format!("client {k}: NOT served again in 60 s, {f} calls failed: {:.200}", c.status()) } } }); }
    while let Some(r) = js.join_next().await { println!("silent_bound {n}: {}", r.unwrap()); }
    println!("silent_bound {n}: {} connections to the good one since the cut", through.load(SeqCst) - before);
}
// --- ends during an outage
async fn ends() {
    for how in ["drop", "shutdown"] { for fault in ["hang", "refused", "dribble", "429", "blocked"] {
        let p = backend().await; let on = Arc::new(AtomicBool::new(false)); let o = on.clone();
        let raw = Raw::start(move |r| {
            if r.has("catalog/datacenters") { return Act::Send(good(1, "[\"dc1\",\"dc2\"]")); }
            if r.has("acl/authorize") { return Act::Send(answer("401 Unauthorized", "", "ACL support disabled")); }
            if o.load(SeqCst) { match fault { "hang" => return Act::Hang, "refused" => return Act::Close, "429" => return Act::Send(answer("429 x", "Retry-After: 30\r\n", "")), "dribble" => return Act::Dribble(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n[\r\n".to_vec(), b"1\r\n \r\n".to_vec(), Duration::from_millis(50)), _ => {} } }
            block(r, 7, &format!("[{}]", entry(&r.service(), "c", p, "dc1")))
        }).await;
        let rt = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let url = raw.url();
        let m = rt.metrics();
        let h = rt.spawn(async move {
            let mut b = ConsulService::builder(ConsulConfig::new(&url).unwrap()).fallback(Fallback::nearest()).keep_warm(true).wait(Duration::from_secs(1));
            for i in 0..30 { b = b.service(ServiceOptions::new(format!("s{i}"))); }
            let s = b.build().unwrap();
            for i in 0..30 { if let Err(e) = call(&s.grpc_client(&format!("s{i}")).unwrap(), 9000).await { println!("ends: {e}") } }
            s
        });
        let s = h.await.unwrap();
        on.store(true, SeqCst); sleep(Duration::from_millis(2500)).await;
        for i in 0..30 { let s = s.clone(); rt.spawn(async move { let _ = s.update_grpc_client(&format!("s{i}")).await; }); }
        sleep(Duration::from_millis(200)).await;
        let before = (m.num_alive_tasks(), raw.open.load(SeqCst));
        let t = Instant::now();
        if how == "shutdown" { let s2 = s.clone(); let _ = timeout(Duration::from_secs(20), rt.spawn(async move { s2.shutdown().await })).await; }
        let took = t.elapsed();
        drop(s);
        let t = Instant::now();
        while t.elapsed() < Duration::from_secs(15) && (m.num_alive_tasks() > 0) { sleep(Duration::from_millis(20)).await }
        println!("ends {how}/{fault}: before {before:?} shutdown took {took:?}; {} tasks {} conns left after {:?}; most conns {}", m.num_alive_tasks(), raw.open.load(SeqCst), t.elapsed(), raw.most.load(SeqCst));
        rt.shutdown_background();
    } }
}
// --- many updates while it is away
async fn storm() {
    let p = backend().await; let on = Arc::new(AtomicBool::new(false)); let o = on.clone();
    let raw = Raw::start(move |r| { if o.load(SeqCst) { return Act::Close } block(r, 7, &format!("[{}]", entry("counter", "c", p, "dc1"))) }).await;
    let s = ConsulService::builder(ConsulConfig::new(&raw.url()).unwrap()).service(ServiceOptions::new("counter")).build().unwrap();
    let c = s.grpc_client("counter").unwrap(); call(&c, 5000).await.unwrap(); watch(&c, "storm");
    on.store(true, SeqCst);
    let before = raw.count(|_| true); let done = Arc::new(AtomicUsize::new(0));
    let mut hs = Vec::new();
    for _ in 0..200 { let (s, d) = (s.clone(), done.clone()); hs.push(tokio::spawn(async move { loop { let _ = s.update_grpc_client("counter").await; d.fetch_add(1, SeqCst); tokio::task::yield_now().await; } })); }
    let t = Instant::now(); let mut failed = 0; let mut worst = Duration::ZERO;
    while t.elapsed() < Duration::from_secs(10) { let t1 = Instant::now(); failed += usize::from(call(&c, 2000).await.is_err()); worst = worst.max(t1.elapsed()); sleep(Duration::from_millis(20)).await }
    println!("storm: {} updates answered, {} requests to the dead registry in 10 s; calls failed {failed} slowest {worst:?}", done.load(SeqCst), raw.count(|_| true) - before);
    on.store(false, SeqCst);
    sleep(Duration::from_secs(8)).await; println!("storm after: {}", c.status()); for h in hs { h.abort() }
}
// --- runtimes
fn runtimes() {
    let r = std::panic::catch_unwind(|| { let r = ConsulService::builder(ConsulConfig::new("127.0.0.1:1").unwrap()).service(ServiceOptions::new("a")).build(); r.map(drop).map_err(|e| e.to_string()) });
    println!("runtimes: outside: {:?}", r.map_err(|p| p.downcast_ref::<String>().cloned().or(p.downcast_ref::<&str>().map(|s| s.to_string()))));
    for (io, time) in [(true, false), (false, true)] {
        let r = std::panic::catch_unwind(move || { let mut b = tokio::runtime::Builder::new_current_thread(); if io { b.enable_io(); } if time { b.enable_time(); } let rt = b.build().unwrap(); rt.block_on(async { let s = ConsulService::builder(ConsulConfig::new("127.0.0.1:1").unwrap()).service(ServiceOptions::new("a")).build().map_err(|e| e.to_string())?; let c = s.grpc_client("a").unwrap(); let h = tokio::spawn(async move { call(&c, 1000).await.map_err(|e| e.to_string()) }); h.await.map_err(|e| e.to_string())? }) });
        println!("runtimes io={io} time={time}: {:?}", r.map_err(|p| p.downcast_ref::<String>().cloned().or(p.downcast_ref::<&str>().map(|s| s.to_string()))));
    }
}
#[tokio::main]
async fn main() {
    if std::env::var_os("LOG").is_some() { tracing_subscriber::fmt().with_max_level(tracing::Level::INFO).init(); }
    let _: HashMap<(), ()> = HashMap::new();
    for name in std::env::args().skip(1) {
        match &*name {
            "dc_short" => dc_short().await, "dc_vanish" => dc_vanish(false).await, "dc_vanish_warm" => dc_vanish(true).await,
            "hung1" => hung_dc(1).await, "hung10" => hung_dc(10).await, "hung60" => hung_dc(60).await, "warm10" => hung_warm(10, false).await, "warm60" => hung_warm(60, false).await, "warm60two" => hung_warm(60, true).await, "warm30" => hung_warm(30, false).await,
            "token" => token_leak().await, "shapeless" => shapeless().await, "manners" => manners().await, "indexes" => indexes().await,
            "keep1" => keepalive(1).await, "keep5" => keepalive(5).await, "many" => many_instances(10_000).await, "many1k" => many_instances(1000).await, "behind" => behind_first().await, "bad" => bad_first().await,
            "sbound3" => silent_bound(3).await, "sbound20" => silent_bound(20).await, "dc_never" => dc_never().await, "disagree" => disagree().await, "many_good" => many_good(10_000).await, "limit10" => limited(300, 10).await, "limit40" => limited(300, 40).await, "idle1000" => idle(1000).await, "idle1001" => idle(1001).await, "idle1002" => idle(1002).await,  "echo" => echo().await, "names" => names().await, "no_list" => no_list().await, "leaderless" => leaderless("127.0.0.1:28500").await, "real0" => real_limited(300, 0).await, "real160" => real_limited(300, 160).await,  "real180" => real_limited(300, 180).await, "silent5" => silent(5, false).await, "silent15" => silent(15, false).await, "silent40" => silent(40, false).await, "refuse40" => silent(40, true).await, "refuse200" => silent(200, true).await, "odd" => odd().await, "halves" => halves().await, "cycles" => cycles(1000).await, "ends" => ends().await, "storm" => storm().await,
            "runtimes" => tokio::task::spawn_blocking(|| std::thread::spawn(runtimes).join().unwrap()).await.unwrap(),
            _ => println!("? {name}"),
        }
    }
}
