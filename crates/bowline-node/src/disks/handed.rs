//! Front ends of a disk, without the disk: on their way to another process.

use std::{
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    sync::Arc,
};

use bowline_block::front::{fuse, nbd, ublk};
use serde::{Deserialize, Serialize};

use super::replace::{Packed, Parcel};

/// What was handed over of the front ends of a disk.
#[derive(Debug, Default)]
pub struct HandedFrontEnds {
    /// The NBD server.
    pub nbd: Option<nbd::Handed>,
    /// The mount.
    pub fuse: Option<fuse::Handed>,
    /// A service manager keeps copies, together with this state of theirs.
    pub kept: Option<Arc<OwnedFd>>,
    /// The block device.
    pub ublk: Option<ublk::DeviceId>,
    /// Changes of the disk were answered that no flush has made durable: the next process has to
    /// flush them at its end. `None` if the former process did not say.
    pub is_unflushed: Option<bool>,
}

impl HandedFrontEnds {
    /// Tells whether there are any.
    pub const fn is_any(&self) -> bool {
        self.nbd.is_some() || self.fuse.is_some() || self.ublk.is_some()
    }

    /// Tells whether changes may have been answered that are not durable.
    pub fn may_be_unflushed(&self) -> bool {
        // Machines flush by themselves what they have written.
        self.is_unflushed.unwrap_or(self.is_any())
    }
}

/// What lies in a parcel, in this order: the listener of NBD, its clients, the mount, and what a
/// service manager keeps of them.
#[derive(Deserialize, Serialize)]
struct Contents {
    /// Clients of NBD.
    nbd: Option<Vec<Client>>,
    fuse: Option<Mounted>,
    is_kept: bool,
    ublk: Option<Device>,
    /// Versions of before do not say it.
    #[serde(default)]
    is_unflushed: Option<bool>,
}

/// The block device.
#[derive(Deserialize, Serialize)]
struct Device {
    id: u32,
    tag: u64,
}

/// The mount.
#[derive(Deserialize, Serialize)]
struct Mounted {
    /// How often the file is open.
    opens: usize,
    /// Its device number.
    device: u64,
}

/// A client of NBD.
#[derive(Deserialize, Serialize)]
struct Client {
    #[serde(with = "Format")]
    format: nbd::Format,
    has_allocation: bool,
    /// Number of bytes that were read and not handled.
    unread: usize,
    /// Number of bytes that were not sent.
    unsent: usize,
}

/// What it has negotiated about requests and replies.
#[derive(Deserialize, Serialize)]
#[serde(remote = "nbd::Format", rename_all = "kebab-case")]
enum Format {
    Simple,
    Structured,
    Extended,
}

impl HandedFrontEnds {
    /// Makes a parcel of it.
    ///
    /// # Errors
    /// Those of JSON.
    pub fn pack(&self) -> io::Result<Packed<'_>> {
        let mut parcel = Packed::default();
        let ublk = self.ublk.map(|device| Device { id: device.id, tag: device.tag });
        let is_kept = self.kept.is_some();
        let is_unflushed = self.is_unflushed;
        let mut contents = Contents { nbd: None, fuse: None, is_kept, ublk, is_unflushed };
        if let Some(nbd) = &self.nbd {
            parcel.descriptors.push(nbd.listener.as_fd());
            for client in &nbd.clients {
                parcel.descriptors.push(client.socket.as_fd());
                parcel.bytes.extend(&client.unread);
                parcel.bytes.extend(&client.unsent);
            }
            let clients = nbd.clients.iter().map(|client| Client {
                format: client.session.format,
                has_allocation: client.session.has_allocation,
                unread: client.unread.len(),
                unsent: client.unsent.len(),
            });
            contents.nbd = Some(clients.collect());
        }
        if let Some(fuse) = &self.fuse {
            parcel.descriptors.push(fuse.kernel.as_fd());
            contents.fuse = Some(Mounted { opens: fuse.opens, device: fuse.device });
        }
        parcel.descriptors.extend(self.kept.as_ref().map(|kept| kept.as_fd()));
        parcel.state = serde_json::to_string(&contents)?;
        Ok(parcel)
    }

    /// Reads a parcel.
    ///
    /// # Errors
    /// `InvalidData`: it is not of this version.
    pub fn unpack(parcel: Parcel) -> io::Result<Self> {
        let contents: Contents = serde_json::from_str(&parcel.state)?;
        let mut descriptors = parcel.descriptors.into_iter();
        let mut next = || -> io::Result<OwnedFd> {
            descriptors.next().ok_or_else(|| io::ErrorKind::InvalidData.into())
        };
        let mut rest = parcel.bytes.as_slice();
        let mut bytes = |len: usize| -> io::Result<Vec<u8>> {
            let (first, others) = rest.split_at_checked(len).ok_or(io::ErrorKind::InvalidData)?;
            rest = others;
            Ok(first.to_vec())
        };
        let mut handed = Self { is_unflushed: contents.is_unflushed, ..Self::default() };
        if let Some(clients) = contents.nbd {
            let listener = Arc::new(UnixListener::from(next()?));
            let clients = clients.into_iter().map(|client| {
                let Client { format, has_allocation, unread, unsent } = client;
                let socket = Arc::new(UnixStream::from(next()?));
                let session = nbd::Session { format, has_allocation };
                let (unread, unsent) = (bytes(unread)?, bytes(unsent)?);
                Ok(nbd::HandedClient { socket, session, unread, unsent })
            });
            let clients = clients.collect::<io::Result<Vec<_>>>()?;
            handed.nbd = Some(nbd::Handed { listener, clients });
        }
        if let Some(Mounted { opens, device }) = contents.fuse {
            handed.fuse = Some(fuse::Handed { kernel: Arc::new(next()?), opens, device });
        }
        if contents.is_kept {
            handed.kept = Some(Arc::new(next()?));
        }
        handed.ublk = contents.ublk.map(|Device { id, tag }| ublk::DeviceId { id, tag });
        Ok(handed)
    }
}
