//! What `recv` answers to the end of a stream, by which `send` learns what became of its bytes
//! (docs/spec/tools.md, section 14).
//!
//! ```text
//! 0          12      16         24      32
//! "bowline recv"  state  messages   bytes      numbers in network order
//! ```

use bowline_node::shares::Amount;

const NAME: [u8; 12] = *b"bowline recv";
const LEN: usize = 32;

/// What became of a stream.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum State {
    /// What was taken is written.
    Written = 0,
    /// Nothing was taken: the receiver takes the stream of another sender.
    Ignored = 1,
}

/// The answer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Receipt {
    pub(super) state: State,
    /// Messages, without the empty one, and their bytes.
    pub(super) taken: Amount,
}

impl Receipt {
    pub(super) fn encode(self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        bytes[..12].copy_from_slice(&NAME);
        bytes[12..16].copy_from_slice(&(self.state as u32).to_be_bytes());
        bytes[16..24].copy_from_slice(&(self.taken.messages as u64).to_be_bytes());
        bytes[24..].copy_from_slice(&(self.taken.bytes as u64).to_be_bytes());
        bytes
    }

    /// Reads one; `None` for any other message.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let rest = bytes.strip_prefix(&NAME).filter(|_| bytes.len() == LEN)?;
        let number = |at: usize| Some(u64::from_be_bytes(*rest.get(at..)?.first_chunk()?));
        let state = match u32::from_be_bytes(*rest.first_chunk()?) {
            0 => State::Written,
            1 => State::Ignored,
            _ => return None,
        };
        let [messages, bytes] = [number(4)?, number(12)?].map(usize::try_from);
        Some(Self { state, taken: Amount { messages: messages.ok()?, bytes: bytes.ok()? } })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receipt_is_read_as_it_was_written_and_nothing_else_is_one() {
        let taken = Amount { messages: 3, bytes: 0x0102_0304 };
        for state in [State::Written, State::Ignored] {
            let receipt = Receipt { state, taken };
            let bytes = receipt.encode();
            assert_eq!(Receipt::decode(&bytes), Some(receipt));
            assert_eq!(Receipt::decode(&bytes[..31]), None);
        }
        let mut bytes = Receipt { state: State::Written, taken }.encode();
        assert_eq!(bytes[28..], [1, 2, 3, 4]);
        bytes[15] = 2;
        assert_eq!(Receipt::decode(&bytes), None);
        assert_eq!(Receipt::decode(&[0; 32]), None);
    }
}
