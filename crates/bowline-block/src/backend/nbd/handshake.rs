//! The client's side of the fixed newstyle handshake, up to the first request.
//!
//! ```text
//!   server                              client
//!   NBDMAGIC IHAVEOPT flags      --->
//!                                <---   flags
//!                                <---   STRUCTURED_REPLY
//!   ACK, or an error             --->
//!                                <---   GO, export, INFO_BLOCK_SIZE
//!   INFO .., ACK, or an error    --->
//! ```

use std::io::{self, ErrorKind, Read, Write};

use super::wire::{self, Fields};

/// Most replies to one option.
const REPLIES_MAX: u32 = 64;
/// Longest reply to an option in bytes: the name of an export, or a text.
const REPLY_MAX: u32 = 64 << 10;
/// Longest text of a server that is printed.
const TEXT_MAX: usize = 200;
/// Largest block that a disk can have.
const BLOCK_MAX: u32 = 4096;
/// Largest block that a server prefers, by the protocol's advice.
const PREFERRED_MAX: u32 = 32 << 20;

/// What the server offers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Export {
    /// Size in bytes.
    pub bytes: u64,
    /// Transmission flags.
    pub flags: u16,
    /// Smallest unit of requests in bytes: a power of two, at most 4096.
    pub min_block: u32,
    /// Unit that the server works in best, a power of two.
    pub preferred_block: u32,
    /// Most data of one request in bytes, at least one smallest unit of a disk.
    pub max_payload: u32,
    /// Replies are chunks.
    pub is_structured: bool,
}

impl Export {
    /// Tells whether it has a flag.
    pub(crate) fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// Negotiates the use of an export.
///
/// # Errors
/// The server refuses it, or breaks the rules (`InvalidData`), or errors of the stream.
pub(crate) fn run<S: Read + Write>(stream: &mut S, name: &str) -> io::Result<Export> {
    let greeting: [u8; 18] = read(stream)?;
    let mut at = Fields(&greeting);
    if (at.u64(), at.u64()) != (Some(wire::GREETING), Some(wire::OPTION)) {
        return Err(invalid("this is not an NBD server of the newstyle protocol"));
    }
    let flags = at.u16().unwrap_or(0);
    if flags & wire::FIXED_NEWSTYLE == 0 {
        return Err(invalid("the server has no fixed newstyle handshake: it is too old"));
    }
    let own = u32::from(flags & (wire::FIXED_NEWSTYLE | wire::NO_ZEROES));
    stream.write_all(&own.to_be_bytes())?;
    let is_structured = structured(stream)?;
    let export = go(stream, name, is_structured)?;
    check(&export)
}

/// Asks for structured replies.
fn structured<S: Read + Write>(stream: &mut S) -> io::Result<bool> {
    send(stream, wire::OPT_STRUCTURED_REPLY, &[])?;
    match reply(stream, wire::OPT_STRUCTURED_REPLY)? {
        (wire::REP_ACK, _) => Ok(true),
        (error, _) if error & wire::REP_ERROR != 0 => Ok(false),
        _ => Err(invalid("a wrong answer about structured replies")),
    }
}

/// Asks for an export.
fn go<S: Read + Write>(stream: &mut S, name: &str, is_structured: bool) -> io::Result<Export> {
    let len = u32::try_from(name.len()).map_err(|_| invalid("the name is too long"))?;
    let wishes = [1, wire::INFO_BLOCK_SIZE].map(u16::to_be_bytes).concat();
    send(stream, wire::OPT_GO, &[&len.to_be_bytes(), name.as_bytes(), &wishes].concat())?;
    let mut offered = None;
    let [mut min_block, mut preferred_block, mut most] = [1, 4096, wire::MAX_PAYLOAD];
    for _ in 0..REPLIES_MAX {
        let (kind, data) = reply(stream, wire::OPT_GO)?;
        let mut at = Fields(&data);
        match kind {
            wire::REP_ACK => {
                let (bytes, flags) = offered.ok_or_else(|| invalid("an export without a size"))?;
                return Ok(Export {
                    bytes,
                    flags,
                    min_block,
                    preferred_block,
                    max_payload: most.min(wire::MAX_PAYLOAD),
                    is_structured,
                });
            }
            wire::REP_INFO => match (at.u16(), data.len()) {
                (Some(wire::INFO_EXPORT), 12) => offered = at.u64().zip(at.u16()),
                (Some(wire::INFO_BLOCK_SIZE), 14) => {
                    for block in [&mut min_block, &mut preferred_block, &mut most] {
                        *block = at.u32().unwrap_or(0);
                    }
                }
                (Some(wire::INFO_EXPORT | wire::INFO_BLOCK_SIZE) | None, _) => {
                    return Err(invalid("information of a wrong length"));
                }
                // Of names and descriptions nothing is needed.
                (Some(_), _) => {}
            },
            error if error & wire::REP_ERROR != 0 => return Err(refused(error, name, &data)),
            _ => return Err(invalid("a wrong answer about the export")),
        }
    }
    Err(invalid("too many answers about the export"))
}

/// Checks what the server says of itself.
fn check(export: &Export) -> io::Result<Export> {
    let Export { bytes, flags, min_block, preferred_block, max_payload, .. } = *export;
    if flags & wire::HAS_FLAGS == 0 || i64::try_from(bytes).is_err() {
        return Err(invalid("a wrong size, or wrong flags"));
    }
    if !min_block.is_power_of_two()
        || !preferred_block.is_power_of_two()
        || preferred_block > PREFERRED_MAX
        || preferred_block < min_block
    {
        return Err(invalid("wrong sizes of blocks"));
    }
    if min_block > BLOCK_MAX {
        let text = format!("its blocks of {min_block} bytes are larger than a disk can have");
        return Err(io::Error::new(ErrorKind::Unsupported, text));
    }
    if max_payload < BLOCK_MAX {
        return Err(invalid("its largest request is smaller than a block"));
    }
    Ok(*export)
}

fn send<S: Write>(stream: &mut S, option: u32, data: &[u8]) -> io::Result<()> {
    let len = u32::try_from(data.len()).map_err(|_| invalid("an option is too long"))?;
    let head = [&wire::OPTION.to_be_bytes()[..], &option.to_be_bytes(), &len.to_be_bytes()];
    stream.write_all(&[&head.concat(), data].concat())
}

/// Reads a reply to an option: its type and its data.
fn reply<S: Read>(stream: &mut S, option: u32) -> io::Result<(u32, Vec<u8>)> {
    let head: [u8; 20] = read(stream)?;
    let mut at = Fields(&head);
    if (at.u64(), at.u32()) != (Some(wire::OPTION_REPLY), Some(option)) {
        return Err(invalid("an answer to something else"));
    }
    let (Some(kind), Some(len)) = (at.u32(), at.u32()) else {
        return Err(invalid("an answer that is cut off"));
    };
    if len > REPLY_MAX {
        return Err(invalid("an answer is too long"));
    }
    let mut data = vec![0; len as usize];
    stream.read_exact(&mut data)?;
    Ok((kind, data))
}

/// Explains why the server refuses an export.
fn refused(error: u32, name: &str, text: &[u8]) -> io::Error {
    let said = String::from_utf8_lossy(text.get(..TEXT_MAX).unwrap_or(text)).into_owned();
    let said = if said.is_empty() { said } else { format!(" ({})", said.escape_debug()) };
    let (kind, why) = match error {
        wire::REP_ERR_UNKNOWN => {
            (ErrorKind::NotFound, format!("the server has no export \"{name}\""))
        }
        wire::REP_ERR_TLS_REQD => {
            (ErrorKind::Unsupported, "the server wants TLS, which is not supported".to_owned())
        }
        wire::REP_ERR_POLICY => {
            (ErrorKind::PermissionDenied, "the server does not allow it".to_owned())
        }
        wire::REP_ERR_UNSUP => {
            (ErrorKind::Unsupported, "the server is too old: it lacks NBD_OPT_GO".to_owned())
        }
        _ => (ErrorKind::Other, format!("the server refuses the export: error {error:#x}")),
    };
    io::Error::new(kind, why + &said)
}

fn read<const N: usize>(stream: &mut impl Read) -> io::Result<[u8; N]> {
    let mut out = [0; N];
    stream.read_exact(&mut out)?;
    Ok(out)
}

pub(super) fn invalid(text: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, text)
}

#[cfg(test)]
mod tests {
    use super::super::script::Script;
    use super::*;

    fn greeting(flags: u16) -> Vec<u8> {
        [&b"NBDMAGICIHAVEOPT"[..], &flags.to_be_bytes()].concat()
    }

    fn answer(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
        let len = data.len() as u32;
        let numbers = [option, kind, len].map(u32::to_be_bytes).concat();
        [&wire::OPTION_REPLY.to_be_bytes()[..], &numbers, data].concat()
    }

    fn export(bytes: u64, flags: u16) -> Vec<u8> {
        let data = [&[0, 0][..], &bytes.to_be_bytes(), &flags.to_be_bytes()].concat();
        answer(7, wire::REP_INFO, &data)
    }

    fn blocks(sizes: [u32; 3]) -> Vec<u8> {
        answer(7, wire::REP_INFO, &[&[0, 3][..], &sizes.map(u32::to_be_bytes).concat()].concat())
    }

    fn run_with(parts: &[Vec<u8>]) -> (io::Result<Export>, Vec<u8>) {
        let sent = parts.concat();
        let mut script = Script::new(&sent);
        (run(&mut script, "disk"), script.output)
    }

    #[test]
    fn an_export_is_as_the_server_says() {
        let parts = [
            greeting(3),
            answer(8, wire::REP_ACK, b""),
            answer(7, wire::REP_INFO, b"\0\x01disk"),
            export(1 << 20, 0x6d),
            blocks([512, 4096, 1 << 20]),
            answer(7, wire::REP_ACK, b""),
        ];
        let (found, sent) = run_with(&parts);
        let wanted = Export {
            bytes: 1 << 20,
            flags: 0x6d,
            min_block: 512,
            preferred_block: 4096,
            max_payload: 1 << 20,
            is_structured: true,
        };
        assert_eq!(found.unwrap(), wanted);
        let option = |number: u32, data: &[u8]| {
            let len = data.len() as u32;
            [&b"IHAVEOPT"[..], &number.to_be_bytes(), &len.to_be_bytes(), data].concat()
        };
        let go = option(7, b"\0\0\0\x04disk\0\x01\0\x03");
        assert_eq!(sent, [vec![0, 0, 0, 3], option(8, b""), go].concat());
        // One that knows neither chunks nor sizes of blocks.
        let parts = [
            greeting(1),
            answer(8, wire::REP_ERR_UNSUP, b"what?"),
            export(4096, 1),
            answer(7, wire::REP_ACK, b""),
        ];
        let found = run_with(&parts).0.unwrap();
        assert!(!found.is_structured && found.max_payload == 32 << 20 && found.min_block == 1);
    }

    #[test]
    fn a_server_that_breaks_the_rules_or_refuses_is_left_with_the_reason() {
        let begin = [greeting(3), answer(8, wire::REP_ACK, b"")].concat();
        let ack = answer(7, wire::REP_ACK, b"");
        let many = answer(7, wire::REP_INFO, b"\0\x09").repeat(100);
        let error = |parts: &[Vec<u8>]| run_with(parts).0.unwrap_err().to_string();
        for (parts, wanted) in [
            (vec![b"HTTP/1.1 400 Bad Request\r\n".to_vec()], "not an NBD server"),
            (vec![greeting(0)], "fixed newstyle"),
            (vec![greeting(1), answer(7, wire::REP_ACK, b"")], "something else"),
            (vec![greeting(1), answer(8, wire::REP_INFO, b"")], "wrong answer"),
            (vec![begin.clone(), ack.clone()], "without a size"),
            (vec![begin.clone(), export(1 << 63, 1), ack.clone()], "wrong size"),
            (vec![begin.clone(), export(512, 0), ack.clone()], "flags"),
            (vec![begin.clone(), export(512, 1), blocks([3, 4096, 4096]), ack.clone()], "blocks"),
            (vec![begin.clone(), export(512, 1), blocks([1, 0, 4096]), ack.clone()], "blocks"),
            (
                vec![begin.clone(), export(512, 1), blocks([8192, 8192, 8192]), ack.clone()],
                "larger than a disk",
            ),
            (
                vec![begin.clone(), export(512, 1), blocks([512, 512, 512]), ack.clone()],
                "smaller than a block",
            ),
            (vec![begin.clone(), answer(7, wire::REP_INFO, b"\0\0\0")], "wrong length"),
            (vec![begin.clone(), many], "too many"),
            (vec![begin.clone(), answer(7, wire::REP_ERR_UNKNOWN, b"no\n")], "\"disk\" (no\\n)"),
            (vec![begin.clone(), answer(7, wire::REP_ERR_TLS_REQD, b"")], "TLS"),
            (vec![begin.clone(), answer(7, wire::REP_ERR_POLICY, b"")], "not allow"),
            (vec![begin.clone(), answer(7, 1 << 31 | 99, b"")], "0x80000063"),
        ] {
            let said = error(&parts);
            assert!(said.contains(wanted), "{wanted}: {said}");
        }
        let mut long = answer(7, wire::REP_INFO, b"");
        long[16..20].copy_from_slice(&u32::MAX.to_be_bytes());
        assert!(error(&[begin, long]).contains("too long"));
    }
}
