//! A small HTTP server: one thread, one text, answers to `GET` and `HEAD`, one request for each
//! connection.
//!
//! The sockets are ours, since the bounds are the point of this server, and the libraries that have
//! them bring a runtime for tasks along; requests are parsed by httparse, which hyper uses too.
//!
//! ```text
//! accept -> Reading, HEAD_MAX bytes -> Writing -> Draining, DRAIN_MAX bytes -> closed
//!           (all of it within PATIENCE, at most CONNECTIONS_MAX at once, the oldest goes first)
//! ```

use std::{
    collections::VecDeque,
    io::{self, ErrorKind, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    os::unix::net::UnixStream,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Exposition, Source, host::Hosts};

/// Most connections at once.
const CONNECTIONS_MAX: usize = 16;
/// Longest request line with its headers, bytes.
const HEAD_MAX: usize = 8 << 10;
/// Most headers of a request.
const HEADERS_MAX: usize = 64;
/// Most bytes that are read and thrown away after the answer, so that it is not lost to a reset.
const DRAIN_MAX: usize = 64 << 10;
/// Longest life of a connection.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a text is good for further requests: many clients ask the node no more than this.
const FRESH: Duration = Duration::from_millis(100);
/// Time without looks at the listener after an error, such as no descriptors left.
const PAUSE: Duration = Duration::from_millis(200);

const TEXT_FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";
const START_PAGE: &str =
    "<!DOCTYPE html>\n<title>bowline</title>\n<a href=\"/metrics\">metrics</a>\n";

/// Serves until it is dropped.
#[derive(Debug)]
pub struct Server {
    place: SocketAddr,
    /// The thread ends when this does.
    wake: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens at `place`, where port 0 chooses one.
    pub(super) fn start(place: SocketAddr, hosts: Hosts, source: Source) -> io::Result<Self> {
        let listener = TcpListener::bind(place)?;
        listener.set_nonblocking(true)?;
        let place = listener.local_addr()?;
        let (wake, end) = UnixStream::pair()?;
        let service = Service {
            listener,
            end,
            hosts,
            source,
            text: None,
            resume: Instant::now(),
            connections: VecDeque::new(),
        };
        let thread =
            thread::Builder::new().name("metrics".to_owned()).spawn(move || service.run())?;
        Ok(Self { place, wake: Some(wake), thread: Some(thread) })
    }

    /// Returns where it listens.
    pub(super) fn place(&self) -> SocketAddr {
        self.place
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.wake.take());
        // A thread that panicked has said so on standard error.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

struct Service {
    listener: TcpListener,
    end: UnixStream,
    hosts: Hosts,
    source: Source,
    /// The last text, and when it was taken.
    text: Option<(Instant, Arc<str>)>,
    /// When the listener is looked at again.
    resume: Instant,
    /// Oldest first.
    connections: VecDeque<Connection>,
}

impl Service {
    fn run(mut self) {
        loop {
            let now = Instant::now();
            self.connections.retain(|connection| now < connection.deadline);
            let Ok((ended, arrived, ready)) = self.wait(now) else { return };
            if ended {
                return;
            }
            // The connections of `ready` come before those that are accepted now.
            let mut kept = VecDeque::new();
            for (mut connection, ready) in
                std::mem::take(&mut self.connections).into_iter().zip(ready)
            {
                if !ready
                    || connection
                        .advance(|path| self.answer(path))
                        .is_ok_and(|step| step == Step::Stay)
                {
                    kept.push_back(connection);
                }
            }
            self.connections = kept;
            if arrived {
                self.accept();
            }
        }
    }

    /// Waits for something to do: the end, a client, connections that are ready.
    fn wait(&self, now: Instant) -> io::Result<(bool, bool, Vec<bool>)> {
        let listens = now >= self.resume;
        let mut fds = vec![PollFd::new(&self.end, PollFlags::IN)];
        let wanted = if listens { PollFlags::IN } else { PollFlags::empty() };
        fds.push(PollFd::new(&self.listener, wanted));
        fds.extend(
            self.connections
                .iter()
                .map(|connection| PollFd::new(&connection.stream, connection.state.wanted())),
        );
        let next = self.connections.iter().map(|connection| connection.deadline).min();
        let next = next.into_iter().chain((!listens).then_some(self.resume)).min();
        let limit = next.map(|next| next.saturating_duration_since(now) + Duration::from_millis(1));
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        match poll(&mut fds, limit.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let mut ready = fds.iter().map(|fd| !fd.revents().is_empty());
        let (ended, arrived) = (ready.next() == Some(true), ready.next() == Some(true));
        Ok((ended, arrived, ready.collect()))
    }

    /// Takes what has connected. Where there is no room, the oldest connection goes: a client in
    /// good order is done long before it is that.
    fn accept(&mut self) {
        for _ in 0..CONNECTIONS_MAX {
            match self.listener.accept() {
                Ok((stream, _)) if stream.set_nonblocking(true).is_ok() => {
                    if self.connections.len() == CONNECTIONS_MAX {
                        self.connections.pop_front();
                    }
                    self.connections.push_back(Connection::new(stream));
                }
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => {
                    self.resume = Instant::now() + PAUSE;
                    return;
                }
            }
        }
    }

    fn answer(&mut self, request: Request) -> Answer {
        let is_ours = request.host.is_none_or(|host| self.hosts.include(&host));
        let target = if is_ours { request.target } else { Err(MISDIRECTED) };
        let (status, kind, body): (_, _, Arc<str>) = match target {
            Ok(Target::Metrics) => ("200 OK", TEXT_FORMAT, self.text()),
            Ok(Target::Start) => ("200 OK", "text/html; charset=utf-8", START_PAGE.into()),
            Err(status) => {
                let advice = if status == MISDIRECTED { OTHER_NAME } else { "" };
                let text = format!("{status}\n{advice}");
                (status, "text/plain; charset=utf-8", text.into())
            }
        };
        let allow = if status == METHOD_NOT_ALLOWED { "Allow: GET, HEAD\r\n" } else { "" };
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n{allow}\
             X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n",
            body.len()
        );
        let body = if request.head_only { "".into() } else { body };
        Answer { head, body, sent: 0 }
    }

    /// Returns the metrics of this moment, or of a moment ago.
    fn text(&mut self) -> Arc<str> {
        if let Some((at, text)) = &self.text
            && at.elapsed() < FRESH
        {
            return Arc::clone(text);
        }
        let mut out = Exposition::default();
        (self.source)(&mut out);
        let text: Arc<str> = out.finish().into();
        self.text = Some((Instant::now(), Arc::clone(&text)));
        text
    }
}

/// What a client is told that asks for another host.
const OTHER_NAME: &str = "The name in the Host header is not accepted: use an IP address of this host, or \
                          allow the name with the option --metrics-host NAME.\n";

/// What a request wants.
#[derive(Debug, Eq, PartialEq)]
struct Request {
    target: Result<Target, &'static str>,
    head_only: bool,
    /// As what host the client knows this one, if it says so.
    host: Option<Vec<u8>>,
}

#[derive(Debug, Eq, PartialEq)]
enum Target {
    Metrics,
    Start,
}

const BAD_REQUEST: &str = "400 Bad Request";
const NOT_FOUND: &str = "404 Not Found";
const MISDIRECTED: &str = "421 Misdirected Request";
const METHOD_NOT_ALLOWED: &str = "405 Method Not Allowed";
const TOO_LARGE: &str = "431 Request Header Fields Too Large";

impl Request {
    /// Parses the head of a request; `None` as long as it may still become one.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let refused = |status| Some(Self { target: Err(status), head_only: false, host: None });
        let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
        let mut request = httparse::Request::new(&mut headers);
        match request.parse(bytes) {
            Ok(httparse::Status::Complete(_)) => {}
            Ok(httparse::Status::Partial) if bytes.len() < HEAD_MAX => return None,
            Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
                return refused(TOO_LARGE);
            }
            Err(_) => return refused(BAD_REQUEST),
        }
        // Before 1.1, of which httparse calls the minor version 1, a client need not name it.
        let mut named = request.headers.iter().filter(|h| h.name.eq_ignore_ascii_case("host"));
        let host = match (named.next(), named.next()) {
            (Some(host), None) => Some(host.value.to_vec()),
            (None, None) if request.version == Some(0) => None,
            _ => return refused(BAD_REQUEST),
        };
        let head_only = request.method == Some("HEAD");
        if !head_only && request.method != Some("GET") {
            return Some(Self { target: Err(METHOD_NOT_ALLOWED), head_only, host });
        }
        let path = request.path.unwrap_or_default().split('?').next();
        let target = match path {
            Some("/metrics") => Ok(Target::Metrics),
            Some("/") => Ok(Target::Start),
            _ => Err(NOT_FOUND),
        };
        Some(Self { target, head_only, host })
    }
}

struct Answer {
    head: String,
    body: Arc<str>,
    /// Bytes of both that were written.
    sent: usize,
}

impl Answer {
    fn rest(&self) -> &[u8] {
        match self.sent.checked_sub(self.head.len()) {
            None => &self.head.as_bytes()[self.sent..],
            Some(at) => &self.body.as_bytes()[at..],
        }
    }
}

enum State {
    Reading(Vec<u8>),
    Writing(Answer),
    /// So many bytes were thrown away.
    Draining(usize),
}

impl State {
    const fn wanted(&self) -> PollFlags {
        match self {
            Self::Reading(_) | Self::Draining(_) => PollFlags::IN,
            Self::Writing(_) => PollFlags::OUT,
        }
    }
}

#[derive(Debug, Eq, PartialEq)]
enum Step {
    Stay,
    Done,
}

struct Connection {
    stream: TcpStream,
    deadline: Instant,
    state: State,
}

impl Connection {
    fn new(stream: TcpStream) -> Self {
        let deadline = Instant::now() + PATIENCE;
        Self { stream, deadline, state: State::Reading(Vec::new()) }
    }

    /// Goes on after the socket has become ready; an error ends the connection.
    fn advance(&mut self, answer: impl FnOnce(Request) -> Answer) -> io::Result<Step> {
        match self.step(answer) {
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                Ok(Step::Stay)
            }
            result => result,
        }
    }

    fn step(&mut self, answer: impl FnOnce(Request) -> Answer) -> io::Result<Step> {
        let mut bytes = [0; 2048];
        if let State::Reading(head) = &mut self.state {
            let room = bytes.len().min(HEAD_MAX - head.len());
            let len = self.stream.read(&mut bytes[..room])?;
            head.extend_from_slice(&bytes[..len]);
            let Some(request) = Request::parse(head) else {
                return Ok(if len == 0 { Step::Done } else { Step::Stay });
            };
            self.state = State::Writing(answer(request));
        }
        if let State::Writing(answer) = &mut self.state {
            while !answer.rest().is_empty() {
                match self.stream.write(answer.rest())? {
                    0 => return Err(ErrorKind::WriteZero.into()),
                    len => answer.sent += len,
                }
            }
            self.stream.shutdown(Shutdown::Write)?;
            self.state = State::Draining(0);
            return Ok(Step::Stay);
        }
        let State::Draining(before) = &mut self.state else { return Ok(Step::Stay) };
        let len = self.stream.read(&mut bytes)?;
        *before += len;
        Ok(if len == 0 || *before > DRAIN_MAX { Step::Done } else { Step::Stay })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    fn server(text: &'static str) -> (Server, Arc<AtomicU32>) {
        let taken = Arc::<AtomicU32>::default();
        let count = Arc::clone(&taken);
        let source: Source = Box::new(move |out| {
            count.fetch_add(1, Ordering::Relaxed);
            out.family("a", super::super::exposition::Kind::Gauge, text).sample(&[], 1);
        });
        let hosts = Hosts::new(vec!["node1.example".to_owned()]);
        (Server::start("127.0.0.1:0".parse().unwrap(), hosts, source).unwrap(), taken)
    }

    fn ask(server: &Server, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(server.place()).unwrap();
        stream.write_all(request).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn metrics_and_a_page_that_leads_there_are_all_there_is() {
        let (server, _) = server("One.");
        let text = ask(&server, b"GET /metrics?x=1 HTTP/1.1\r\nHost: localhost\r\n\r\n");
        assert!(text.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4;"));
        assert!(text.ends_with("\r\n\r\n# HELP a One.\n# TYPE a gauge\na 1\n"), "{text}");
        let head = ask(&server, b"HEAD /metrics HTTP/1.0\r\n\r\n");
        assert!(head.contains("Content-Length: 33\r\n") && head.ends_with("\r\n\r\n"), "{head}");
        assert!(
            ask(&server, b"GET / HTTP/1.1\r\nHost: [::1]\r\n\r\n").contains("href=\"/metrics\"")
        );
        for (request, status) in [
            ("GET /metrics/ HTTP/1.1\r\nHost: [::1]\r\n\r\n", NOT_FOUND),
            ("GET /etc/passwd HTTP/1.1\r\nHost: [::1]\r\n\r\n", NOT_FOUND),
            (
                "POST /metrics HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 3\r\n\r\nabc",
                METHOD_NOT_ALLOWED,
            ),
            ("nonsense\r\n\r\n", BAD_REQUEST),
            ("GET /metrics HTTP/9\r\n\r\n", BAD_REQUEST),
        ] {
            let answer = ask(&server, request.as_bytes());
            assert!(answer.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{answer}");
        }
        assert!(
            ask(&server, b"PUT / HTTP/1.1\r\nHost: [::1]\r\n\r\n")
                .contains("\r\nAllow: GET, HEAD\r\n")
        );
    }

    /// A page whose name leads here does not get a browser to read for it (DNS rebinding).
    #[test]
    fn who_asks_for_another_host_is_refused() {
        let (server, taken) = server("One.");
        let own = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let place = server.place().to_string();
        for host in [&*place, "node1.example:9465", "localhost", &own, "[fe80::1]:1"] {
            let request = format!("GET /metrics HTTP/1.1\r\nhost: {host}\r\n\r\n");
            assert!(ask(&server, request.as_bytes()).ends_with("\na 1\n"), "{host}");
        }
        assert!(ask(&server, b"GET /metrics HTTP/1.0\r\n\r\n").ends_with("\na 1\n"));
        let before = taken.load(Ordering::Relaxed);
        thread::sleep(2 * FRESH);
        for (path, version) in [("/metrics", 1), ("/", 1), ("/nothing", 1), ("/metrics", 0)] {
            for host in ["evil.example", "evil.example:9465", "", "localhost.evil.example"] {
                let request = format!("GET {path} HTTP/1.{version}\r\nHost: {host}\r\n\r\n");
                let answer = ask(&server, request.as_bytes());
                assert!(answer.starts_with(&format!("HTTP/1.1 {MISDIRECTED}\r\n")), "{answer}");
                assert!(answer.contains("--metrics-host NAME") && !answer.contains("evil"));
            }
        }
        let put = ask(&server, b"PUT / HTTP/1.1\r\nHost: evil.example\r\n\r\n");
        assert!(put.starts_with(&format!("HTTP/1.1 {MISDIRECTED}\r\n")), "{put}");
        for request in [
            "GET /metrics HTTP/1.1\r\n\r\n",
            "GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
            "GET /metrics HTTP/1.0\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
            "PUT /metrics HTTP/1.1\r\n\r\n",
        ] {
            let answer = ask(&server, request.as_bytes());
            assert!(answer.starts_with(&format!("HTTP/1.1 {BAD_REQUEST}\r\n")), "{answer}");
        }
        assert_eq!(taken.load(Ordering::Relaxed), before, "nobody looked at the node for them");
    }

    #[test]
    fn a_request_without_an_end_is_refused() {
        let (server, _) = server("One.");
        let long = [b"GET /".as_slice(), &[b'a'; HEAD_MAX]].concat();
        assert!(ask(&server, &long).starts_with(&format!("HTTP/1.1 {TOO_LARGE}\r\n")));
        let many = "a: b\r\n".repeat(HEADERS_MAX + 1);
        let many = format!("GET / HTTP/1.1\r\n{many}\r\n");
        assert!(ask(&server, many.as_bytes()).starts_with(&format!("HTTP/1.1 {TOO_LARGE}\r\n")));
    }

    #[test]
    fn clients_that_say_nothing_keep_nobody_out() {
        let (server, _) = server("One.");
        let open = || TcpStream::connect(server.place()).unwrap();
        let mut silent: Vec<TcpStream> = (0..4 * CONNECTIONS_MAX).map(|_| open()).collect();
        assert!(ask(&server, b"GET /metrics HTTP/1.1\r\nHost: [::1]\r\n\r\n").contains("a 1\n"));
        // The oldest had to go.
        assert_eq!(silent[0].read(&mut [0; 1]).unwrap_or(0), 0);
        drop(silent);
    }

    #[test]
    fn a_request_that_comes_slowly_does_not_go_on_for_ever() {
        let (server, _) = server("One.");
        let mut slow = TcpStream::connect(server.place()).unwrap();
        slow.write_all(b"GET /metrics HTTP/1.1\r\nHost: ").unwrap();
        slow.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        // A byte every half second fills no head in this time.
        let has_ended = (0..120).any(|_| match slow.read(&mut [0; 1]) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => slow.write_all(b"1").is_err(),
            Ok(n) => n == 0,
            Err(_) => true,
        });
        assert!(has_ended);
    }

    #[test]
    fn requests_at_one_time_cost_one_look() {
        let (server, taken) = server("One.");
        let request = b"GET /metrics HTTP/1.1\r\nHost: [::1]\r\n\r\n";
        let before = Instant::now();
        let asked = 50;
        for _ in 0..asked {
            ask(&server, request);
        }
        let most = before.elapsed().as_millis() / FRESH.as_millis() + 1;
        assert!(u128::from(taken.load(Ordering::Relaxed)) <= most.min(asked));
    }
}
