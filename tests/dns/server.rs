//! A small DNS server on loopback: real packets, records that a test sets.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use hickory_proto::{
    op::{Message, OpCode, ResponseCode},
    rr::{Name, RData, Record, RecordType, rdata::SRV},
};
use parking_lot::Mutex;
use tokio::net::UdpSocket;
use tokio_util::task::AbortOnDropHandle;

/// How the server behaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Mood {
    #[default]
    Answers,
    /// Takes the question and says nothing.
    Silent,
    /// SERVFAIL to everything.
    Fails,
    /// SERVFAIL to questions for AAAA alone.
    FailsForIpv6,
    /// NXDOMAIN to everything.
    KnowsNoName,
}

#[derive(Default)]
struct Zone {
    mood: Mood,
    ttl: u32,
    records: HashMap<(Name, RecordType), Vec<RData>>,
    asked: usize,
}

/// Ends with its handle.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    zone: Arc<Mutex<Zone>>,
    _task: AbortOnDropHandle<()>,
}

impl Server {
    pub(crate) async fn start(ttl: u32) -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let zone = Arc::new(Mutex::new(Zone { ttl, ..Zone::default() }));
        let its = zone.clone();
        let task = tokio::spawn(async move {
            let mut buffer = [0; 4096];
            loop {
                let (length, from) = socket.recv_from(&mut buffer).await.unwrap();
                let answer = its.lock().answer(&Message::from_vec(&buffer[..length]).unwrap());
                if let Some(answer) = answer {
                    socket.send_to(&answer.to_vec().unwrap(), from).await.unwrap();
                }
            }
        });
        Self { address, zone, _task: AbortOnDropHandle::new(task) }
    }

    /// Replaces the addresses of a name. None at all: the name stays.
    pub(crate) fn hosts(&self, name: &str, addresses: &[&str]) {
        let addresses: Vec<IpAddr> = addresses.iter().map(|it| it.parse().unwrap()).collect();
        let kinds = [(RecordType::A, true), (RecordType::AAAA, false)];
        for (kind, v4) in kinds {
            let of_kind = addresses.iter().copied().filter(|it| it.is_ipv4() == v4);
            self.set(name, kind, of_kind.map(RData::from).collect());
        }
    }

    /// Replaces the SRV records of a name: priority, weight, port, target.
    pub(crate) fn srv(&self, name: &str, records: &[(u16, u16, u16, &str)]) {
        let record = |&(priority, weight, port, target)| {
            RData::SRV(SRV::new(priority, weight, port, fully_qualified(target)))
        };
        self.set(name, RecordType::SRV, records.iter().map(record).collect());
    }

    pub(crate) fn mood(&self, mood: Mood) {
        self.zone.lock().mood = mood;
    }

    /// How many questions have come.
    pub(crate) fn asked(&self) -> usize {
        self.zone.lock().asked
    }

    fn set(&self, name: &str, kind: RecordType, records: Vec<RData>) {
        self.zone.lock().records.insert((fully_qualified(name), kind), records);
    }
}

impl Zone {
    fn answer(&mut self, question: &Message) -> Option<Message> {
        self.asked += 1;
        let query = question.queries.first().unwrap().clone();
        let (name, kind) = (query.name().to_lowercase(), query.query_type());
        let mut answer = Message::response(question.metadata.id, OpCode::Query);
        answer.metadata.recursion_available = true;
        answer.add_query(query);
        let known = self.records.keys().any(|(it, _)| *it == name);
        answer.metadata.response_code = match self.mood {
            Mood::Silent => return None,
            Mood::Fails => ResponseCode::ServFail,
            Mood::FailsForIpv6 if kind == RecordType::AAAA => ResponseCode::ServFail,
            Mood::KnowsNoName => ResponseCode::NXDomain,
            _ if !known => ResponseCode::NXDomain,
            _ => {
                let records = self.records.get(&(name.clone(), kind)).into_iter().flatten();
                for data in records {
                    answer.add_answer(Record::from_rdata(name.clone(), self.ttl, data.clone()));
                }
                ResponseCode::NoError
            }
        };
        Some(answer)
    }
}

fn fully_qualified(name: &str) -> Name {
    let mut name = Name::from_utf8(name).unwrap();
    name.set_fqdn(true);
    name
}
