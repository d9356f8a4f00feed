//! The control device: makes, starts, stops and removes devices.
#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;

use io_uring::{IoUring, cqueue, opcode, squeue, types};

use super::abi::{self, Info};

const PATH: &str = "/dev/ublk-control";

/// The control device, one command at a time.
pub(super) struct Control {
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    file: File,
}

impl Control {
    pub(super) fn open() -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(PATH).map_err(|error| {
            let what = match error.kind() {
                io::ErrorKind::NotFound => "the kernel has no ublk_drv loaded",
                io::ErrorKind::PermissionDenied => "ublk needs root",
                _ => "cannot be opened",
            };
            io::Error::new(error.kind(), format!("{PATH}: {what}"))
        })?;
        Ok(Self { ring: IoUring::builder().build(4)?, file })
    }

    /// Makes a device with one queue, which stays when its server ends if it has a tag and the
    /// kernel can do that.
    pub(super) fn add(&mut self, depth: u16, max_io: u32, tag: Option<u64>) -> io::Result<Info> {
        let mut info = abi::new_device(depth, max_io, tag);
        self.exchange(abi::Control::AddDev, u32::MAX, &mut info)?;
        Ok(Info::parse(&info))
    }

    /// Describes a device.
    pub(super) fn info(&mut self, id: u32) -> io::Result<Info> {
        let mut info = [0; abi::INFO_LEN];
        self.exchange(abi::Control::GetDevInfo, id, &mut info)?;
        Ok(Info::parse(&info))
    }

    pub(super) fn set_params(&mut self, id: u32, params: &mut [u8]) -> io::Result<()> {
        self.exchange(abi::Control::SetParams, id, params)
    }

    pub(super) fn params(&mut self, id: u32) -> io::Result<[u8; abi::PARAMS_LEN]> {
        let mut params = abi::no_params();
        self.exchange(abi::Control::GetParams, id, &mut params)?;
        Ok(params)
    }

    /// Readies a quiesced device for the next server. Fails with `EBUSY` until the former one is
    /// gone.
    pub(super) fn start_recovery(&mut self, id: u32) -> io::Result<()> {
        self.run(abi::Control::StartUserRecovery, abi::control(id, 0, 0, 0))
    }

    /// Has requests come again; waits until all tags of the queue wait for requests.
    pub(super) fn end_recovery(&mut self, id: u32) -> io::Result<()> {
        let data = std::process::id().into();
        self.run(abi::Control::EndUserRecovery, abi::control(id, 0, 0, data))
    }

    /// Makes the disk appear; waits until all tags of the queue wait for requests.
    pub(super) fn start(&mut self, id: u32) -> io::Result<()> {
        let data = std::process::id().into();
        self.run(abi::Control::StartDev, abi::control(id, 0, 0, data))
    }

    /// Makes the disk disappear; waits for requests in flight.
    pub(super) fn stop(&mut self, id: u32) -> io::Result<()> {
        self.run(abi::Control::StopDev, abi::control(id, 0, 0, 0))
    }

    /// Releases the device number; waits until the disk is no longer open.
    pub(super) fn delete(&mut self, id: u32) -> io::Result<()> {
        self.run(abi::Control::DelDev, abi::control(id, 0, 0, 0))
    }

    /// Runs a command with memory that the kernel reads and writes.
    fn exchange(&mut self, command: abi::Control, id: u32, bytes: &mut [u8]) -> io::Result<()> {
        let len = bytes.len() as u16;
        let addr = bytes.as_mut_ptr().expose_provenance() as u64;
        self.run(command, abi::control(id, addr, len, 0))
    }

    fn run(&mut self, command: abi::Control, bytes: [u8; 80]) -> io::Result<()> {
        let fd = types::Fd(self.file.as_raw_fd());
        let entry = opcode::UringCmd80::new(fd, command as u32).cmd(bytes).build();
        // SAFETY: the memory that the command names is in the caller's hands until the completion,
        // which is waited for here.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.map_err(|_| io::ErrorKind::WouldBlock)?;
        loop {
            match self.ring.submit_and_wait(1) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Must not return before the completion, since the kernel uses the addresses.
                other => drop(other),
            }
            if let Some(done) = self.ring.completion().next() {
                return match done.result() {
                    0.. => Ok(()),
                    errno => Err(io::Error::from_raw_os_error(-errno)),
                };
            }
        }
    }
}
