//! Listeners that are no gRPC server.

use std::time::Duration;

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpSocket, TcpStream},
    task::JoinSet,
};

/// Something that listens on a port until it is dropped.
pub(crate) struct Listening {
    pub(crate) port: u16,
    _tasks: JoinSet<()>,
    _held: Vec<TcpStream>,
}

/// A port on which nobody listens until this is dropped: bound, it is nobody else's. Not the testkit's
/// `Port`, for `tests/client_only` has no testkit.
pub(crate) struct Refused {
    pub(crate) port: u16,
    _bound: TcpSocket,
}

pub(crate) fn refused() -> Refused {
    let bound = TcpSocket::new_v4().unwrap();
    bound.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    Refused { port: bound.local_addr().unwrap().port(), _bound: bound }
}

/// Accepts, reads, and never says a word.
pub(crate) async fn silent() -> Listening {
    listen(|mut stream| async move {
        let mut buffer = [0; 1024];
        while !matches!(stream.read(&mut buffer).await, Ok(0) | Err(_)) {}
    })
    .await
}

/// Accepts, reads what comes first, and closes without a word.
pub(crate) async fn closing() -> Listening {
    listen(|mut stream| async move {
        let _ = stream.read(&mut [0; 1024]).await;
    })
    .await
}

/// An HTTP/1 server: what it does not understand is a bad request.
pub(crate) async fn http1() -> Listening {
    listen(|mut stream| async move {
        let _ = stream.read(&mut [0; 1024]).await;
        let _ = stream
            .write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            .await;
    })
    .await
}

async fn listen<F>(serve: impl Fn(TcpStream) -> F + Send + 'static) -> Listening
where
    F: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut streams = JoinSet::new();
        while let Ok((stream, _)) = listener.accept().await {
            streams.spawn(serve(stream));
        }
    });
    Listening { port, _tasks: tasks, _held: Vec::new() }
}

/// Never completes a connection: its accept queue is full, and the system drops what else comes.
pub(crate) async fn black_hole() -> Listening {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(0).unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut held = Vec::new();
    // Until one hangs.
    while let Ok(stream) =
        tokio::time::timeout(Duration::from_millis(200), TcpStream::connect(("127.0.0.1", port))).await
    {
        held.push(stream.unwrap());
    }
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let _listener = listener;
        std::future::pending().await
    });
    Listening { port, _tasks: tasks, _held: held }
}
