//! The other side of a connection, for tests of both sides of NBD.

use std::io::{self, Read, Write};

/// A peer that has sent everything before it reads.
pub(crate) struct Script<'a> {
    /// What of it has not been read yet.
    pub(crate) input: &'a [u8],
    /// What it gets.
    pub(crate) output: Vec<u8>,
}

impl<'a> Script<'a> {
    pub(crate) const fn new(input: &'a [u8]) -> Self {
        Self { input, output: Vec::new() }
    }
}

impl Read for Script<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.input.read(out)
    }
}

impl Write for Script<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.output.write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
