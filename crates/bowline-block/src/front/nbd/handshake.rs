//! The handshake of a client, until it has chosen an export.

use std::io::{self, Read, Write};

use bowline_rnbd::Limits;

use super::contexts::{self, Queries};
use super::wire::{self, Fields, Format, Session};

/// Longest data of an option in bytes; longer ones are refused.
const MAX_OPTION: u32 = 16 << 10;
/// Longest data in bytes that is read to be refused; longer ones end the connection.
const MAX_SKIPPED: u32 = 1 << 20;
/// Options one client may send.
const MAX_OPTIONS: usize = 64;
const MALFORMED: &[u8] = b"malformed, or in the wrong place";
const NO_EXPORT: &[u8] = b"there is no such export";

/// How the handshake ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Outcome {
    /// The client sends requests next.
    Begin(Session),
    /// The client ends the connection.
    Abort,
}

/// Negotiates the only export, `name`, which the empty name selects too.
///
/// # Errors
/// Errors of the socket, or `InvalidData` for an invalid handshake: the caller closes the
/// connection.
pub(super) fn run(
    socket: &mut (impl Read + Write),
    name: &str,
    limits: impl Fn() -> Limits,
) -> io::Result<Outcome> {
    let mut hello = Vec::with_capacity(18);
    hello.extend(wire::GREETING.to_be_bytes());
    hello.extend(wire::OPTION.to_be_bytes());
    hello.extend((wire::FIXED_NEWSTYLE | wire::NO_ZEROES).to_be_bytes());
    socket.write_all(&hello)?;
    let mut flags = [0; 4];
    socket.read_exact(&mut flags)?;
    let flags = u32::from_be_bytes(flags);
    if flags & !u32::from(wire::FIXED_NEWSTYLE | wire::NO_ZEROES) != 0 {
        return Err(broken("unknown flags"));
    }
    let mut session = Session::default();
    for _ in 0..MAX_OPTIONS {
        let (option, data) = read_option(socket)?;
        let Some(data) = data else {
            answer(socket, option, wire::REP_ERR_TOO_BIG, b"the option is too long")?;
            continue;
        };
        let mine = |wanted: &[u8]| wanted.is_empty() || wanted == name.as_bytes();
        match option {
            // With extended headers there is only NBD_OPT_GO.
            wire::OPT_EXPORT_NAME if session.format != Format::Extended && mine(&data) => {
                // NBD_OPT_EXPORT_NAME has no error reply: a wrong name ends the connection.
                let limits = limits();
                let mut out = Vec::with_capacity(134);
                out.extend(limits.bytes.to_be_bytes());
                out.extend(wire::transmission_flags(&limits, session).to_be_bytes());
                if flags & u32::from(wire::NO_ZEROES) == 0 {
                    out.extend([0; 124]);
                }
                socket.write_all(&out)?;
                return Ok(Outcome::Begin(session));
            }
            wire::OPT_EXPORT_NAME => {
                return Err(broken("it has chosen an export that is not here"));
            }
            wire::OPT_ABORT => {
                // The client may not wait for this reply.
                let _ = answer(socket, option, wire::REP_ACK, &[]);
                return Ok(Outcome::Abort);
            }
            wire::OPT_LIST if data.is_empty() => {
                let mut out = (name.len() as u32).to_be_bytes().to_vec();
                out.extend(name.as_bytes());
                answer(socket, option, wire::REP_SERVER, &out)?;
                answer(socket, option, wire::REP_ACK, &[])?;
            }
            wire::OPT_INFO | wire::OPT_GO => match parse_info(&data) {
                None => answer(socket, option, wire::REP_ERR_INVALID, MALFORMED)?,
                Some((wanted, _)) if !mine(wanted) => {
                    answer(socket, option, wire::REP_ERR_UNKNOWN, NO_EXPORT)?;
                }
                Some((_, wants_name)) => {
                    let name = wants_name.then_some(name);
                    send_info(socket, option, &limits(), session, name)?;
                    answer(socket, option, wire::REP_ACK, &[])?;
                    if option == wire::OPT_GO {
                        return Ok(Outcome::Begin(session));
                    }
                }
            },
            wire::OPT_EXTENDED_HEADERS if data.is_empty() => {
                session.format = Format::Extended;
                answer(socket, option, wire::REP_ACK, &[])?;
            }
            wire::OPT_STRUCTURED_REPLY if data.is_empty() && session.format == Format::Extended => {
                answer(socket, option, wire::REP_ERR_EXT_HEADER_REQD, b"extended headers stay")?;
            }
            wire::OPT_STRUCTURED_REPLY if data.is_empty() => {
                session.format = Format::Structured;
                answer(socket, option, wire::REP_ACK, &[])?;
            }
            wire::OPT_LIST_META_CONTEXT | wire::OPT_SET_META_CONTEXT => {
                let selects = option == wire::OPT_SET_META_CONTEXT;
                if selects {
                    // Even an option that fails replaces the selection of an earlier one.
                    session.has_allocation = false;
                }
                let queries = Queries::parse(&data).filter(|_| session.format != Format::Simple);
                match queries {
                    None => answer(socket, option, wire::REP_ERR_INVALID, MALFORMED)?,
                    Some(queries) if !mine(queries.export) => {
                        answer(socket, option, wire::REP_ERR_UNKNOWN, NO_EXPORT)?;
                    }
                    Some(queries) => {
                        session.has_allocation |= selects && queries.selects;
                        // The id has no meaning in a list.
                        let id = if selects { contexts::ALLOCATION_ID } else { 0 };
                        if if selects { queries.selects } else { queries.lists } {
                            let name = contexts::ALLOCATION.as_bytes();
                            let context = [&id.to_be_bytes()[..], name].concat();
                            answer(socket, option, wire::REP_META_CONTEXT, &context)?;
                        }
                        answer(socket, option, wire::REP_ACK, &[])?;
                    }
                }
            }
            wire::OPT_LIST | wire::OPT_STRUCTURED_REPLY | wire::OPT_EXTENDED_HEADERS => {
                answer(socket, option, wire::REP_ERR_INVALID, MALFORMED)?;
            }
            wire::OPT_STARTTLS if data.is_empty() => {
                let text = b"there is no TLS: the socket belongs to one user of this machine";
                answer(socket, option, wire::REP_ERR_UNSUP, text)?;
            }
            wire::OPT_STARTTLS => answer(socket, option, wire::REP_ERR_INVALID, MALFORMED)?,
            _ => answer(socket, option, wire::REP_ERR_UNSUP, b"unknown option")?,
        }
    }
    Err(broken("too many options"))
}

/// Makes the error that ends the connection of a client which has broken the protocol.
pub(super) fn broken(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Reads an option; `None` in place of data that is too long.
fn read_option(socket: &mut impl Read) -> io::Result<(u32, Option<Vec<u8>>)> {
    let mut head = [0; 16];
    socket.read_exact(&mut head)?;
    let mut at = Fields(&head);
    let (magic, option, len) = (at.u64(), at.u32(), at.u32());
    let (Some(wire::OPTION), Some(option), Some(len)) = (magic, option, len) else {
        return Err(broken("no option where one should begin"));
    };
    // NBD_OPT_EXPORT_NAME has no error reply.
    if len > MAX_SKIPPED || (len > MAX_OPTION && option == wire::OPT_EXPORT_NAME) {
        return Err(broken("an option that is too long"));
    }
    if len > MAX_OPTION {
        let skipped = io::copy(&mut socket.take(len.into()), &mut io::sink())?;
        let whole = skipped == u64::from(len);
        return if whole { Ok((option, None)) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
    }
    let mut data = vec![0; len as usize];
    socket.read_exact(&mut data)?;
    Ok((option, Some(data)))
}

fn answer(socket: &mut impl Write, option: u32, kind: u32, data: &[u8]) -> io::Result<()> {
    let mut out = Vec::with_capacity(20 + data.len());
    out.extend(wire::OPTION_REPLY.to_be_bytes());
    out.extend(option.to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.extend((data.len() as u32).to_be_bytes());
    out.extend(data);
    socket.write_all(&out)
}

/// Parses NBD_OPT_INFO and NBD_OPT_GO: the export, and whether its name is requested.
fn parse_info(data: &[u8]) -> Option<(&[u8], bool)> {
    let mut at = Fields(data);
    let len = at.u32()?;
    let name = at.bytes(usize::try_from(len).ok()?)?;
    let mut wants_name = false;
    for _ in 0..at.u16()? {
        wants_name |= at.u16()? == wire::INFO_NAME;
    }
    at.0.is_empty().then_some((name, wants_name))
}

fn send_info(
    socket: &mut impl Write,
    option: u32,
    limits: &Limits,
    session: Session,
    name: Option<&str>,
) -> io::Result<()> {
    let mut export = wire::INFO_EXPORT.to_be_bytes().to_vec();
    export.extend(limits.bytes.to_be_bytes());
    export.extend(wire::transmission_flags(limits, session).to_be_bytes());
    answer(socket, option, wire::REP_INFO, &export)?;
    if let Some(name) = name {
        let mut out = wire::INFO_NAME.to_be_bytes().to_vec();
        out.extend(name.as_bytes());
        answer(socket, option, wire::REP_INFO, &out)?;
    }
    let mut sizes = wire::INFO_BLOCK_SIZE.to_be_bytes().to_vec();
    for size in [limits.logical, limits.physical.max(4096), wire::MAX_PAYLOAD] {
        sizes.extend(size.to_be_bytes());
    }
    answer(socket, option, wire::REP_INFO, &sizes)
}

#[cfg(test)]
mod tests {
    use super::super::script::Script;
    use super::*;

    fn option(number: u32, data: &[u8]) -> Vec<u8> {
        let mut out = wire::OPTION.to_be_bytes().to_vec();
        out.extend(number.to_be_bytes());
        out.extend((data.len() as u32).to_be_bytes());
        out.extend(data);
        out
    }

    fn ask(flags: u32, options: &[Vec<u8>]) -> (io::Result<Outcome>, Vec<u8>) {
        let mut said = flags.to_be_bytes().to_vec();
        said.extend(options.concat());
        let mut script = Script::new(&said);
        let outcome = run(&mut script, "disk", || Limits::plain(1 << 20));
        (outcome, script.output.split_off(18))
    }

    fn info(name: &str, requests: &[u16]) -> Vec<u8> {
        let mut out = (name.len() as u32).to_be_bytes().to_vec();
        out.extend(name.as_bytes());
        out.extend((requests.len() as u16).to_be_bytes());
        out.extend(requests.iter().flat_map(|n| n.to_be_bytes()));
        out
    }

    fn kinds(mut replies: &[u8]) -> Vec<u32> {
        let mut out = Vec::new();
        while !replies.is_empty() {
            let mut at = Fields(replies);
            assert_eq!(at.u64(), Some(wire::OPTION_REPLY));
            at.u32().unwrap();
            out.push(at.u32().unwrap());
            let len = at.u32().unwrap();
            at.bytes(len as usize).unwrap();
            replies = at.0;
        }
        out
    }

    #[test]
    fn old_clients_get_the_zeroes_they_wait_for() {
        let (outcome, said) = ask(1, &[option(wire::OPT_EXPORT_NAME, b"disk")]);
        assert_eq!(outcome.unwrap(), Outcome::Begin(Session::default()));
        assert_eq!(said.len(), 8 + 2 + 124);
        let (outcome, said) = ask(3, &[option(wire::OPT_EXPORT_NAME, b"")]);
        assert_eq!(outcome.unwrap(), Outcome::Begin(Session::default()));
        assert_eq!(said.len(), 8 + 2);
        assert_eq!(said[..8], (1_u64 << 20).to_be_bytes());
        assert!(ask(3, &[option(wire::OPT_EXPORT_NAME, b"other")]).0.is_err());
    }

    #[test]
    fn questions_are_answered_until_go() {
        let (outcome, said) = ask(
            3,
            &[
                option(wire::OPT_LIST, b""),
                option(wire::OPT_LIST, b"x"),
                option(99, b""),
                option(wire::OPT_INFO, &info("disk", &[wire::INFO_NAME])),
                option(wire::OPT_INFO, &info("other", &[])),
                option(wire::OPT_GO, b"\0\0\0\xffx"),
                option(wire::OPT_GO, &info("", &[])),
            ],
        );
        assert_eq!(outcome.unwrap(), Outcome::Begin(Session::default()));
        let (unsup, invalid, unknown) =
            (wire::REP_ERR_UNSUP, wire::REP_ERR_INVALID, wire::REP_ERR_UNKNOWN);
        assert_eq!(kinds(&said), [2, 1, invalid, unsup, 3, 3, 3, 1, unknown, invalid, 3, 3, 1]);
        let (outcome, said) = ask(3, &[option(wire::OPT_ABORT, b"")]);
        assert_eq!((outcome.unwrap(), kinds(&said)), (Outcome::Abort, vec![1]));
    }

    #[test]
    fn structured_replies_are_negotiated_and_the_flags_show_it() {
        // tests [NB-53]
        let flags = |said: &[u8]| u16::from_be_bytes(said[said.len() - 2..].try_into().unwrap());
        let number = wire::OPT_STRUCTURED_REPLY;
        let structured = Session { format: Format::Structured, has_allocation: false };
        let (outcome, said) = ask(3, &[option(number, b""), option(wire::OPT_EXPORT_NAME, b"")]);
        assert_eq!(outcome.unwrap(), Outcome::Begin(structured));
        assert_eq!(kinds(&said[..20]), [wire::REP_ACK]);
        assert_eq!(flags(&said), wire::transmission_flags(&Limits::plain(0), structured));
        let (outcome, said) = ask(3, &[option(number, b"x"), option(wire::OPT_EXPORT_NAME, b"")]);
        assert_eq!(outcome.unwrap(), Outcome::Begin(Session::default()));
        assert_eq!(kinds(&said[..20 + MALFORMED.len()]), [wire::REP_ERR_INVALID]);
        assert_eq!(flags(&said), wire::transmission_flags(&Limits::plain(0), Session::default()));
    }

    #[test]
    fn extended_headers_stay_and_need_go() {
        // tests [NB-53]
        let (structured, extended) =
            (option(wire::OPT_STRUCTURED_REPLY, b""), option(wire::OPT_EXTENDED_HEADERS, b""));
        let bad = option(wire::OPT_EXTENDED_HEADERS, b"x");
        let go = option(wire::OPT_GO, &info("", &[]));
        let options = [bad, structured.clone(), extended.clone(), structured, go];
        let (outcome, said) = ask(3, &options);
        let session = Session { format: Format::Extended, has_allocation: false };
        assert_eq!(outcome.unwrap(), Outcome::Begin(session));
        let (invalid, required) = (wire::REP_ERR_INVALID, wire::REP_ERR_EXT_HEADER_REQD);
        assert_eq!(kinds(&said), [invalid, 1, 1, required, 3, 3, 1]);
        assert!(ask(3, &[extended, option(wire::OPT_EXPORT_NAME, b"")]).0.is_err());
    }

    #[test]
    fn options_that_are_too_long_and_tls_are_refused_and_the_handshake_continues() {
        let long = vec![0; MAX_OPTION as usize + 1];
        let longest = vec![0; MAX_SKIPPED as usize];
        let options = [
            option(wire::OPT_LIST_META_CONTEXT, &long),
            option(99, &longest),
            option(wire::OPT_STARTTLS, b""),
            option(wire::OPT_STARTTLS, b"x"),
            option(wire::OPT_GO, &info("", &[])),
        ];
        let (outcome, said) = ask(3, &options);
        assert_eq!(outcome.unwrap(), Outcome::Begin(Session::default()));
        let (big, unsup, invalid) =
            (wire::REP_ERR_TOO_BIG, wire::REP_ERR_UNSUP, wire::REP_ERR_INVALID);
        assert_eq!(kinds(&said), [big, big, unsup, invalid, 3, 3, 1]);
        assert!(ask(3, &[option(99, &[&longest[..], b"x"].concat())]).0.is_err());
        assert!(ask(3, &[option(wire::OPT_EXPORT_NAME, &long)]).0.is_err());
        assert!(ask(3, &[option(99, &long)[..9000].to_vec()]).0.is_err(), "cut off");
    }

    #[test]
    fn what_is_no_handshake_ends_the_connection() {
        assert!(ask(4, &[]).0.is_err(), "a flag that does not exist");
        assert!(ask(3, &[vec![0; 16]]).0.is_err(), "no option");
        let mut long = option(wire::OPT_GO, b"");
        long[12..].copy_from_slice(&u32::MAX.to_be_bytes());
        assert!(ask(3, &[long]).0.is_err(), "an option without end");
        assert!(ask(3, &vec![option(99, b""); 65]).0.is_err(), "options without end");
        assert!(ask(3, &[option(wire::OPT_GO, b"\0")[..15].to_vec()]).0.is_err(), "cut off");
    }
}
