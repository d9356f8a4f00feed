//! Wake tokens on a socket, as programs take them.

use crate::WAKE_TOKEN_LEN;
use crate::area::Area;

/// A program's end of a socket.
pub trait ProgramEnd {
    /// Why there is no wake token.
    type Error;

    /// Takes a wake token from the socket. `waits`: the call waits for one where it may.
    ///
    /// # Errors
    /// When there is none, or never will be.
    fn take_token(&self, waits: bool) -> Result<[u8; WAKE_TOKEN_LEN], Self::Error>;

    /// Tells the node that something is new in the memory of this socket.
    fn wake_node(&self);
}

impl Area {
    /// Something was received: if it was the last, the socket is not readable any more.
    pub fn received(&self, end: &impl ProgramEnd) {
        while self.has_wake_token() && self.has_nothing() {
            if self.take_wake_token(end, false).is_err() {
                return;
            }
        }
    }

    /// Takes a wake token from the socket, or waits for one.
    ///
    /// # Errors
    /// Those of [`ProgramEnd::take_token`].
    pub fn take_wake_token<E: ProgramEnd>(&self, end: &E, waits: bool) -> Result<(), E::Error> {
        let token = end.take_token(waits)?;
        self.took_wake_token(end, token);
        Ok(())
    }

    /// A wake token was taken from the socket. If there is still something to receive, the node is
    /// to send another: others wait for it, and `poll` shows it.
    pub fn took_wake_token(&self, end: &impl ProgramEnd, token: [u8; WAKE_TOKEN_LEN]) {
        if self.needs_wake_token(Some(token)) {
            end.wake_node();
        }
    }

    /// A wake token may have been taken from the socket. Tells whether the node is to send another,
    /// as for [`took_wake_token`](Self::took_wake_token): not if who was woken by it has taken
    /// before this all that there was.
    #[must_use]
    pub fn needs_wake_token(&self, taken: Option<[u8; WAKE_TOKEN_LEN]>) -> bool {
        let Some(token) = taken else { return false };
        self.wake_token_taken(u32::from_ne_bytes(token));
        !self.has_nothing()
    }
}
