//! Buffers of messages that are sent without copying them (`--zerocopy`).

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use super::message::Kind;

/// Buffers of a task. Each is used again when its message has been released.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    free: [VecDeque<Arc<Vec<u8>>>; 2],
    held: HashMap<u32, (Kind, Arc<Vec<u8>>)>,
    next: u32,
}

impl Buffers {
    fn free(&mut self, kind: Kind) -> &mut VecDeque<Arc<Vec<u8>>> {
        let [requests, acknowledgements] = &mut self.free;
        match kind {
            Kind::Request => requests,
            Kind::Ack => acknowledgements,
        }
    }

    /// Returns a buffer that nobody uses, and the cookie to send it with. A new one begins as a
    /// copy of `template`.
    pub(crate) fn take(&mut self, kind: Kind, template: &[u8]) -> (Arc<Vec<u8>>, u32) {
        let free = self.free(kind).pop_front();
        (free.unwrap_or_else(|| Arc::new(template.to_vec())), self.next)
    }

    /// Notes whether the buffer of the last [`take`](Self::take) was sent.
    pub(crate) fn sent(&mut self, kind: Kind, buffer: Arc<Vec<u8>>, accepted: bool) {
        if !accepted {
            return self.free(kind).push_front(buffer);
        }
        self.held.insert(self.next, (kind, buffer));
        self.next = self.next.wrapping_add(1);
    }

    /// Takes a buffer back whose message has been released.
    pub(crate) fn completed(&mut self, cookie: u32) -> Result<(), String> {
        let (kind, mut buffer) = self
            .held
            .remove(&cookie)
            .ok_or_else(|| format!("buffer {cookie} was given back, which was not sent"))?;
        if Arc::get_mut(&mut buffer).is_none() {
            return Err(format!("buffer {cookie} was given back while it is in use"));
        }
        self.free(kind).push_back(buffer);
        Ok(())
    }
}
