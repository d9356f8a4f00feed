//! The network of the node, which the host's thread reads.

use std::os::fd::OwnedFd;
use std::time::Duration;

use bowline_rds_driver::{Background, Driver};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;

use crate::service::{KICK, NETWORK};

/// The driver's part of the host's loop.
#[derive(Debug)]
pub(crate) struct Network {
    background: Background,
    /// The loop watches the network.
    is_watched: bool,
}

impl Network {
    pub(crate) fn new(driver: &Driver, epoll: &OwnedFd) -> Result<Self, Errno> {
        let background = driver.take_background();
        let [kick, network] = background.descriptors();
        epoll::add(epoll, kick, EventData::new_u64(KICK), EventFlags::IN)?;
        epoll::add(epoll, network, EventData::new_u64(NETWORK), EventFlags::empty())?;
        Ok(Self { background, is_watched: false })
    }

    /// Does the driver's work of a round. Returns when the next round is due at the latest.
    pub(crate) fn turn(&mut self, epoll: &OwnedFd) -> Duration {
        let turn = self.background.turn();
        if self.is_watched != turn.watches_network {
            let [_, network] = self.background.descriptors();
            let watched = turn.watches_network;
            let flags = if watched { EventFlags::IN } else { EventFlags::empty() };
            let done = epoll::modify(epoll, network, EventData::new_u64(NETWORK), flags);
            // It cannot fail; if it did, the next round would try again.
            self.is_watched = if done.is_ok() { watched } else { !watched };
        }
        turn.next.unwrap_or(Duration::MAX)
    }

    /// What wakes the loop has been seen.
    pub(crate) fn wake_up(&self, token: u64) {
        match token {
            KICK => self.background.take_kick(),
            NETWORK => self.background.read_network(),
            _ => {}
        }
    }
}
