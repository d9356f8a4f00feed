//! Front ends of a disk, without the disk: on their way to another process.

use std::{
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
};

use bowline_block::front::{fuse, nbd};
use serde::{Deserialize, Serialize};

use super::replace::Parcel;

/// What was handed over of the front ends of a disk.
#[derive(Debug, Default)]
pub struct HandedFrontEnds {
    /// The NBD server.
    pub nbd: Option<nbd::Handed>,
    /// The mount.
    pub fuse: Option<fuse::Handed>,
}

/// What lies in a parcel, in this order: the listener of NBD, its clients, and the mount.
#[derive(Deserialize, Serialize)]
struct Contents {
    /// For each client of NBD, numbers of bytes: read and not handled, and not sent.
    nbd: Option<Vec<(usize, usize)>>,
    /// How often the file is open.
    fuse: Option<usize>,
}

impl HandedFrontEnds {
    /// Makes a parcel with copies of all descriptors.
    ///
    /// # Errors
    /// No descriptors left.
    pub fn pack(&self) -> io::Result<Parcel> {
        let mut parcel = Parcel::default();
        let mut contents = Contents { nbd: None, fuse: None };
        if let Some(nbd) = &self.nbd {
            parcel.descriptors.push(nbd.listener.as_fd().try_clone_to_owned()?);
            for client in &nbd.clients {
                parcel.descriptors.push(client.socket.as_fd().try_clone_to_owned()?);
                parcel.bytes.extend(&client.unread);
                parcel.bytes.extend(&client.unsent);
            }
            let lens = nbd.clients.iter().map(|one| (one.unread.len(), one.unsent.len()));
            contents.nbd = Some(lens.collect());
        }
        if let Some(fuse) = &self.fuse {
            parcel.descriptors.push(fuse.kernel.as_fd().try_clone_to_owned()?);
            contents.fuse = Some(fuse.opens);
        }
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
        let mut handed = Self::default();
        if let Some(lens) = contents.nbd {
            let listener = UnixListener::from(next()?);
            let clients = lens.into_iter().map(|(unread, unsent)| {
                let socket = UnixStream::from(next()?);
                let (unread, unsent) = (bytes(unread)?, bytes(unsent)?);
                Ok(nbd::HandedClient { socket, unread, unsent })
            });
            let clients = clients.collect::<io::Result<Vec<_>>>()?;
            handed.nbd = Some(nbd::Handed { listener, clients });
        }
        if let Some(opens) = contents.fuse {
            handed.fuse = Some(fuse::Handed { kernel: next()?, opens });
        }
        Ok(handed)
    }
}
