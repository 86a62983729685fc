//! Streams: of responses, which end with the role, and of requests, which are sent again as far as they are kept.

use std::time::Duration;

use bytes::{Buf, BufMut, Bytes};
use tokio::{sync::mpsc, time::sleep};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    Code, Request, Response, Status,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
};
use tonic_failover::{
    NotPrimary, PrimaryLost,
    client::FailoverChannel,
    demo::pb::{WatchRequest, counter_client::CounterClient},
};

use crate::{
    common::SOON,
    node::Node,
    stage::{Stage, options, served},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_ends_when_the_role_is_lost_and_is_opened_anew_at_the_successor() {
    let (a, b) = (Node::start("a"), Node::start("b"));
    let stage = Stage::ready(options().failures_to_eject(1), vec![a.instance(), b.instance()]).await;
    let mut client = CounterClient::new(stage.channel());
    a.leads(1);
    for (token, from, to) in [(2, &a, &b), (3, &b, &a), (4, &a, &b)] {
        let response = client.watch(WatchRequest::default()).await.unwrap();
        assert_eq!(served(&response).0, from.name);
        let mut stream = response.into_inner();
        assert_eq!(stream.message().await.unwrap().unwrap().instance, from.name);
        from.stands_by(Some(to.as_primary(token)));
        to.leads(token);
        let end = tokio::time::timeout(SOON, stream.message()).await.expect("it ends").unwrap_err();
        assert_eq!(end.code(), Code::Unavailable, "{end:?}");
        let told = PrimaryLost::of(&end).and_then(|it| it.primary).expect("it says who is now");
        assert_eq!(told.instance, to.name);
    }
    assert_eq!(stage.client.status().datacenters[0].ejected, 0, "it is no failure of theirs");
}

/// Sends messages as they come.
async fn send(channel: FailoverChannel, messages: mpsc::Receiver<Bytes>) -> Result<Response<Bytes>, Status> {
    let mut grpc = tonic::client::Grpc::new(channel);
    grpc.ready().await.unwrap();
    let path = http::uri::PathAndQuery::from_static("/test.Sink/Send");
    grpc.client_streaming(Request::new(ReceiverStream::new(messages)), path, Raw).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_streamed_request_that_is_refused_is_sent_again_from_its_beginning() {
    let (a, b) = (Node::start("a"), Node::start("b"));
    let stage = Stage::ready(options(), vec![a.instance(), b.instance()]).await;
    let (sender, messages) = mpsc::channel(8);
    let call = tokio::spawn(send(stage.channel(), messages));
    for _ in 0..5 {
        sender.send(Bytes::from_static(&[7; 1000])).await.unwrap();
        sleep(Duration::from_millis(40)).await;
    }
    let refused = a.asked() + b.asked();
    assert!(refused >= 2, "{refused}");
    b.leads(1);
    sender.send(Bytes::from_static(&[7; 1000])).await.unwrap();
    drop(sender);
    let reply = tokio::time::timeout(SOON, call).await.expect("it ends").unwrap().unwrap();
    assert_eq!(served(&reply).0, "b");
    assert_eq!(*b.journal.lock(), [("6030 bytes".to_owned(), 1)], "each message once, with its frame's head");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn beyond_what_is_kept_its_caller_sees_the_refusal() {
    let (a, b) = (Node::start("a"), Node::start("b"));
    let stage = Stage::ready(options().replay_limit(1500), vec![a.instance(), b.instance()]).await;
    let (sender, messages) = mpsc::channel(8);
    let call = tokio::spawn(send(stage.channel(), messages));
    for _ in 0..3 {
        // It may end at any of them.
        let _ = sender.send(Bytes::from_static(&[7; 1000])).await;
        sleep(Duration::from_millis(40)).await;
    }
    let status = tokio::time::timeout(SOON, call).await.expect("it ends").unwrap().unwrap_err();
    assert!(NotPrimary::of(&status).is_some(), "{status:?}");
    assert_eq!(a.ran() + b.ran(), 0);
}

struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}
