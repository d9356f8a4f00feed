//! RDS and disks in tasks of a tokio runtime, with time limits.

use std::net::IpAddr;
use std::time::Duration;

use bowline::block::{DiskHandle, Durable};
use bowline::rds::Node;
use bowline::rnbd::{Client, ExportServer, Exports, MapOptions, ServerConfig};
use bowline::rtrs::{Engine, PORT};
use tokio::time::timeout;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const FROM: &str = "127.77.14.1:4000";
const TO: &str = "127.77.14.2:4000";

async fn messages() -> Result<()> {
    let near = Node::builder().address("127.77.14.1").build()?;
    let far = Node::builder().address("127.77.14.2").build()?;
    let (socket, echo) = (near.bind(FROM)?, far.bind(TO)?);

    let answers = async {
        loop {
            let message = echo.recv_async().await?;
            echo.send_to_async(&message.to_vec(), message.source()).await?;
        }
    };
    let asks = async {
        socket.connect(TO)?;
        for number in 0..100_u32 {
            socket.send_async(&number.to_be_bytes()).await?;
            // Cancel safe: where the time is up, no message is lost.
            let answer = timeout(Duration::from_secs(5), socket.recv_async()).await??;
            assert_eq!(answer.to_vec(), number.to_be_bytes());
        }
        Result::Ok(())
    };
    tokio::select! {
        ended = answers => ended,
        asked = asks => asked,
    }?;
    // Both nodes have acknowledged what they were sent.
    assert!(near.shutdown_async(Duration::from_secs(5)).await);
    assert!(far.shutdown_async(Duration::from_secs(5)).await);
    Ok(())
}

/// A message with a deadline for a node that does not run; returns what is known of it then.
async fn deadline() -> Result<&'static str> {
    const LIMIT: Duration = Duration::from_millis(200);
    const NOBODY: &str = "127.77.14.9:4000";
    let socket = Node::builder().address("127.77.14.5").build()?.bind("127.77.14.5:4000")?;
    // With many of them, the send buffer is full, and this is what takes too long.
    match timeout(LIMIT, socket.send_to_async(b"order", NOBODY)).await {
        Err(_) => return Ok("not sent"),
        Ok(sent) => sent?,
    };
    match timeout(LIMIT, socket.flush_async()).await {
        // It would wait for that node, and arrive whenever it starts.
        Err(_) => socket.cancel_sent_to(NOBODY)?,
        Ok(flushed) => return Ok(flushed.map(|()| "at its node")?),
    }
    Ok("cancelled")
}

async fn blocks(disk: &DiskHandle) -> Result<()> {
    // Two at a time. These calls are futures for any runtime.
    let (first, second) = ([1; 4096], [2; 4096]);
    tokio::try_join!(
        disk.write_at_async(0, &first, Durable::Later),
        disk.write_at_async(4096, &second, Durable::Later),
    )?;
    disk.flush_async().await?;
    let mut both = [0; 8192];
    disk.read_at_async(0, &mut both).await?;
    assert_eq!(both[..4096], first);
    assert_eq!(both[4096..], second);
    Ok(())
}

fn main() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    runtime.block_on(messages())?;
    assert_eq!(runtime.block_on(deadline())?, "cancelled");

    // Mapping and closing wait for the other side: a server with other tasks to run gives such
    // calls to `spawn_blocking`.
    let (here, there): (IpAddr, IpAddr) = ([127, 77, 14, 3].into(), [127, 77, 14, 4].into());
    let mut exports = Exports::new();
    exports.memory("disk0", 1 << 20, 512)?;
    let at = [(there, PORT).into()];
    let server =
        ExportServer::open(&Engine::soft([there])?, &at, ServerConfig::default(), exports)?;
    let options = MapOptions::new("tasks").paths([(here, there)]);
    let client = Client::new(Engine::soft([here])?, options);
    let disk = client.map("disk0")?;
    runtime.block_on(blocks(&DiskHandle::new(disk)))?;
    client.close();
    server.close();
    println!("messages and blocks");
    Ok(())
}
