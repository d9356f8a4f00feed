//! A channel: requests of one process, one after the other, and their answers.

use bowline_base::{Errno, Instant};
use bowline_host_wire::{FRAME_MAX, Frame, HEAD_LEN, Head, Malformed, NONCE_LEN, Op, SocketHandle};
use serde::{Deserialize, Serialize};

use crate::caller::Caller;
use crate::core::{Arrival, Descriptor};
use crate::rdma::ProcessMemory;

/// Most bytes of memory that an idle channel keeps for requests, and for answers.
const KEPT: usize = 256 << 10;

/// A request that waits until it can be executed.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Waiting {
    pub(crate) handle: SocketHandle,
    /// When it is given up.
    pub(crate) deadline: Option<Instant>,
}

/// One channel.
#[derive(Debug)]
pub(crate) struct Channel<D> {
    stream: D,
    /// The process that opened it.
    pub(crate) caller: Caller,
    /// Other processes have sent on it as well.
    is_shared: bool,
    /// Bytes of requests, of which those before `start` are finished.
    input: Vec<u8>,
    start: usize,
    /// What came with the last of them, if a request may want it.
    descriptor: Option<D>,
    /// Bytes of an answer that the process has not taken yet.
    output: Vec<u8>,
    written: usize,
    /// What it counts for: [`Channel::held`] when it was last asked.
    pub(crate) counted: usize,
    /// The process has said which version it speaks.
    pub(crate) greeted: bool,
    pub(crate) waiting: Option<Waiting>,
    /// Since when it is [full](Self::is_full), or its user behind.
    pub(crate) full_since: Option<Instant>,
    /// A random number that the process is told, and that stands in the memory that it shows.
    pub(crate) nonce: [u8; NONCE_LEN],
    /// The memory of the process, once it has shown it.
    pub(crate) memory: Option<ProcessMemory>,
}

/// State of a channel beside its descriptors.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedChannel {
    #[serde(with = "serde_bytes")]
    input: Vec<u8>,
    #[serde(with = "serde_bytes")]
    output: Vec<u8>,
    greeted: bool,
    nonce: [u8; NONCE_LEN],
    caller: Caller,
    pub(crate) waiting: Option<Waiting>,
}

impl SavedChannel {
    pub(crate) fn caller(&self) -> &Caller {
        &self.caller
    }
}

impl<D: Descriptor> Channel<D> {
    /// A channel that has not greeted.
    pub(crate) fn new(stream: D, caller: Caller, random: [u64; 2]) -> Result<Self, Errno> {
        stream.prepare()?;
        let mut nonce = [0; NONCE_LEN];
        let (first, second) = nonce.split_at_mut(NONCE_LEN / 2);
        first.copy_from_slice(&random[0].to_ne_bytes());
        second.copy_from_slice(&random[1].to_ne_bytes());
        Ok(Self {
            stream,
            caller,
            is_shared: false,
            input: Vec::new(),
            start: 0,
            descriptor: None,
            output: Vec::new(),
            written: 0,
            counted: 0,
            greeted: false,
            waiting: None,
            full_since: None,
            nonce,
            memory: None,
        })
    }

    /// What another process needs to resume the channel, beside its descriptors.
    pub(crate) fn saved(&self) -> SavedChannel {
        SavedChannel {
            input: self.input[self.start..].to_vec(),
            output: self.output[self.written..].to_vec(),
            greeted: self.greeted,
            nonce: self.nonce,
            caller: self.caller.clone(),
            waiting: self.waiting,
        }
    }

    /// Resumes a channel that another process had.
    pub(crate) fn resume(
        stream: D,
        descriptor: Option<D>,
        saved: SavedChannel,
    ) -> Result<Self, Errno> {
        let SavedChannel { input, output, greeted, nonce, caller, waiting } = saved;
        let new = Self::new(stream, caller, [0; 2])?;
        Ok(Self { input, output, greeted, nonce, waiting, descriptor, ..new })
    }

    /// The descriptors of the channel: its own, and what came with a request which is not executed
    /// yet.
    pub(crate) fn into_descriptors(self) -> (D, Option<D>) {
        (self.stream, self.descriptor)
    }

    /// Ends the channel.
    pub(crate) fn end(self) {
        self.stream.end();
    }

    /// A descriptor has come, and no request has taken it yet.
    pub(crate) const fn has_descriptor(&self) -> bool {
        self.descriptor.is_some()
    }

    pub(crate) const fn stream(&self) -> &D {
        &self.stream
    }

    /// Reads what is there, up to a whole request. `Ok(false)`: the process has closed it.
    pub(crate) fn fill(&mut self, scratch: &mut [u8]) -> Result<bool, Errno> {
        while !self.is_full() {
            match self.receive(scratch) {
                Ok((0, _)) => return Ok(false),
                Ok((n, is_all)) => {
                    self.input.extend_from_slice(&scratch[..n]);
                    if n < scratch.len() && is_all {
                        return Ok(true);
                    }
                }
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return Ok(true),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// There is a whole request, or more, and nothing more is read.
    pub(crate) fn is_full(&self) -> bool {
        self.input.len() - self.start >= FRAME_MAX + HEAD_LEN
    }

    /// Reads once; returns how much, and whether that may be all there is: the system ends a read
    /// behind descriptors, and where another sends, who does not if the channel is one process's.
    /// More descriptors than a request takes are an error.
    fn receive(&mut self, scratch: &mut [u8]) -> Result<(usize, bool), Errno> {
        let otherwise = Some(self.caller.user);
        let Arrival { len, mut descriptors, sender } = self.stream.receive(scratch, otherwise)?;
        self.is_shared |= sender.is_some_and(|sender| sender.process != self.caller.process);
        let is_all = descriptors.is_empty() && !self.is_shared;
        match (descriptors.pop(), &self.descriptor) {
            (None, _) => {}
            (Some(one), None) if descriptors.is_empty() && one.may_be_wanted() => {
                self.descriptor = Some(one);
            }
            // No request takes so many, or such a one: as the other end of this channel, which then
            // never ended.
            _ => return Err(Errno::EINVAL),
        }
        Ok((len, is_all))
    }

    /// Takes the bytes of requests out, for the time in which one is executed, and tells where
    /// it begins.
    pub(crate) fn take_input(&mut self) -> (Vec<u8>, usize) {
        (std::mem::take(&mut self.input), self.start)
    }

    /// Puts them back; the first request, of `done` bytes, is finished.
    pub(crate) fn put_input(&mut self, mut input: Vec<u8>, done: usize) {
        self.start += done;
        if self.start == input.len() {
            self.start = 0;
            input.clear();
            if input.capacity() > KEPT {
                input = Vec::new();
            }
        } else if self.start > input.len() / 2 {
            // Each byte is moved once at most, for as many that are finished.
            input.drain(..self.start);
            self.start = 0;
        }
        self.input = input;
    }

    /// The descriptor that came with the request.
    pub(crate) fn take_descriptor(&mut self) -> Option<D> {
        self.descriptor.take()
    }

    /// Tells whether the process wants the request under way, which is the first, to end.
    pub(crate) fn is_interrupted(&self) -> Result<bool, Malformed> {
        let input = &self.input[self.start..];
        let Some((_, len)) = Frame::parse(input)? else { return Ok(false) };
        let next = Frame::parse(&input[len..])?;
        Ok(next.is_some_and(|(frame, _)| frame.head.op == Op::Interrupt))
    }

    /// Answers the request under way.
    pub(crate) fn answer(
        &mut self,
        head: Head,
        name: &[u8],
        control: &[u8],
        payload: &[&[u8]],
        given: &[D::Given],
    ) -> Result<(), Errno> {
        let len = payload.iter().map(|p| p.len()).sum();
        let Some(head) = head.emit(name.len(), control.len(), len) else {
            return Err(Errno::EMSGSIZE);
        };
        let parts = [&head[..], name, control].into_iter().chain(payload.iter().copied());
        let mut bytes = std::mem::take(&mut self.output);
        bytes.clear();
        parts.for_each(|part| bytes.extend_from_slice(part));
        self.output = bytes;
        self.written = 0;
        if !given.is_empty() {
            self.written = self.stream.send(&self.output, given)?;
        }
        self.flush()
    }

    /// Writes what is left of an answer.
    pub(crate) fn flush(&mut self) -> Result<(), Errno> {
        while self.is_answering() {
            match self.stream.send(&self.output[self.written..], &[]) {
                Ok(n) => self.written += n,
                Err(Errno::EAGAIN) => break,
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error),
            }
        }
        if !self.is_answering() && self.output.capacity() > KEPT {
            self.output = Vec::new();
            self.written = 0;
        }
        Ok(())
    }

    /// Bytes of memory for requests and answers.
    pub(crate) fn held(&self) -> usize {
        self.input.capacity() + self.output.capacity()
    }

    /// Gives back memory that holds nothing.
    pub(crate) fn shed(&mut self) {
        self.input.drain(..self.start);
        self.start = 0;
        self.input.shrink_to_fit();
        if !self.is_answering() {
            (self.output, self.written) = (Vec::new(), 0);
        }
    }

    /// Part of an answer waits for the process to read.
    pub(crate) fn is_answering(&self) -> bool {
        self.written < self.output.len()
    }
}
