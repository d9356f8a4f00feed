//! RDS: a client asks, a server answers. Both are of this process, but nothing here would differ in
//! two processes or on two machines.

use std::thread;
use std::time::Duration;

use bowline::rds::{ErrorKind, Node, Socket};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const CLIENT: &str = "127.77.10.1";
const SERVER: &str = "127.77.10.2";
const PORT: u16 = 4000;

/// Answers every request, until the socket is closed.
fn serve(socket: &Socket) -> Result<()> {
    loop {
        let request = match socket.recv_message() {
            Err(error) if error.kind() == ErrorKind::Closed => return Ok(()),
            received => received?,
        };
        let answer = request.to_vec().to_ascii_uppercase();
        socket.send_to(&answer, request.source())?;
    }
}

/// Asks until an answer comes. A request is lost without a word where the server has not bound its
/// port yet, so it is sent again. Each has a number, by which a late answer to an earlier request
/// is told from the one that is waited for.
fn ask(socket: &Socket, number: u32, text: &str) -> Result<String> {
    socket.set_recv_timeout(Some(Duration::from_millis(500)));
    let request = [&number.to_be_bytes()[..], text.as_bytes()].concat();
    for _ in 0..20 {
        socket.send_to(&request, (SERVER, PORT))?;
        loop {
            let answer = match socket.recv_message() {
                Err(error) if error.kind() == ErrorKind::TimedOut => break,
                received => received?.to_vec(),
            };
            if let Some(text) = answer.strip_prefix(&number.to_be_bytes()) {
                return Ok(String::from_utf8(text.to_vec())?);
            }
        }
    }
    Err(format!("{SERVER} does not answer").into())
}

fn main() -> Result<()> {
    let server = Node::builder().address(SERVER).build()?.bind((SERVER, PORT))?;
    // Port 0 chooses one.
    let client = Node::builder().address(CLIENT).build()?.bind((CLIENT, 0))?;

    thread::scope(|scope| {
        let serves = scope.spawn(|| serve(&server));
        let mut answers = ["one", "two"].into_iter().zip(1..);
        let asked = answers.try_for_each(|(text, number)| {
            let answer = ask(&client, number, text)?;
            println!("{text}: {answer}");
            assert_eq!(answer, text.to_uppercase());
            Ok(())
        });
        // Ends the receive that waits in the other thread.
        server.close();
        serves.join().expect("no panic").and(asked)
    })
}
