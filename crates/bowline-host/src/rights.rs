//! The part of the service where it matters whose program asks.

use std::collections::HashSet;
use std::net::SocketAddr;

use bowline_base::Errno;
use bowline_host_wire::{ChannelId, SocketHandle};
use bowline_rds::{InfoTable, SocketId};

use crate::accounts::Charge;
use crate::core::{Core, Outside, Rds};
use crate::options;
use crate::policy::Ports;

/// Ports that are tried for a program that may have some only and wants any of them.
const TRIES: u64 = 1024;

/// The same address with another port.
fn at_port(mut name: SocketAddr, port: u16) -> SocketAddr {
    name.set_port(port);
    name
}

impl<O: Outside> Core<O> {
    /// Makes a socket of the core for a program.
    pub(crate) fn socket_for(&mut self, number: ChannelId) -> Result<(SocketId, Charge), Errno> {
        let user = self.channels.get(&number).ok_or(Errno::EBADF)?.caller.user;
        let made = self.rds.with_core(|core, _| {
            let id = core.socket()?;
            Ok((id, core.send_buffer(id)?, core.recv_buffer(id)?))
        });
        let (id, send, recv) = made.map_err(|error: bowline_rds::Error| error.errno())?;
        match self.accounts.open_socket(user, send, recv) {
            Ok(charge) => Ok((id, charge)),
            Err(errno) => {
                self.rds.close(id);
                Err(errno)
            }
        }
    }

    /// Counts what a channel holds. Returns `false` when its user has too much of it, even after
    /// all channels of the user have given back what they do not need.
    pub(crate) fn count_held(&mut self, number: ChannelId) -> bool {
        let Some(channel) = self.channels.get_mut(&number) else { return true };
        let now = channel.held();
        let before = std::mem::replace(&mut channel.counted, now);
        let user = channel.caller.user;
        if self.accounts.hold(user, before, now) {
            return true;
        }
        for channel in self.channels.values_mut().filter(|channel| channel.caller.user == user) {
            channel.shed();
            let before = std::mem::replace(&mut channel.counted, 0);
            self.accounts.hold(user, before, 0);
        }
        let mut fits = true;
        for channel in self.channels.values_mut().filter(|channel| channel.caller.user == user) {
            channel.counted = channel.held();
            fits = self.accounts.hold(user, 0, channel.counted) && fits;
        }
        if !fits {
            self.accounts.refuse_request(user);
        }
        fits
    }

    /// Brings the node's counter of refusals up to date.
    pub fn count_refusals(&self) {
        match self.accounts.take_uncounted() {
            0 => {}
            count => self.rds.with_core(|core, _| core.count_refused_programs(count)),
        }
    }

    /// The buffers of a socket may have another size now.
    pub(crate) fn count_buffers(&mut self, handle: SocketHandle) {
        let Some((socket, _)) = self.sockets.get_mut(&handle) else { return };
        let sizes = self.rds.with_core(|core, _| {
            Some((core.send_buffer(socket.id).ok()?, core.recv_buffer(socket.id).ok()?))
        });
        if let Some((send, recv)) = sizes {
            self.accounts.resize(&mut socket.charge, send, recv);
        }
    }

    /// Binds a socket where the policy lets this program bind it. Names that nobody can bind to
    /// are left to the core.
    pub(crate) fn bind(
        &self,
        number: ChannelId,
        id: SocketId,
        name: SocketAddr,
    ) -> Result<(), Errno> {
        let caller = &self.channels.get(&number).ok_or(Errno::EBADF)?.caller;
        let bind = |name| self.rds.bind(id, name).map_err(|error| error.errno());
        let ports = self.accounts.ports(caller, name.ip());
        let ranges = match &ports {
            Ports::Only(ranges) if !name.ip().is_unspecified() => ranges,
            _ => return bind(name),
        };
        if name.port() != 0 {
            let may = ports.contain(name.port());
            return if may { bind(name) } else { Err(self.accounts.refuse_bind(caller)) };
        }
        let count: u64 = ranges.iter().map(|range| range.len() as u64).sum();
        if count == 0 {
            return Err(self.accounts.refuse_bind(caller));
        }
        // As R-808 has it, among the ports that the program may have.
        let first = self.outside.random() % count;
        let ports = (0..count.min(TRIES)).filter_map(|n| {
            let mut at = usize::try_from((first + n) % count).ok()?;
            ranges.iter().find_map(|range| {
                let port = range.clone().nth(at);
                at = at.saturating_sub(range.len());
                port
            })
        });
        for port in ports.filter(|port| *port > 1) {
            match bind(at_port(name, port)) {
                Err(Errno::EADDRINUSE) => {}
                done => return done,
            }
        }
        Err(Errno::EADDRINUSE)
    }

    /// A table that `getsockopt` gives, with what this program may see; `None` for other options.
    pub(crate) fn table(
        &mut self,
        number: ChannelId,
        option: (i32, i32),
    ) -> Option<Result<InfoTable, Errno>> {
        let table = options::table(option)?;
        self.release_taken();
        let caller = &self.channels.get(&number)?.caller;
        let result = if self.accounts.may_inspect(caller) {
            self.rds.with_core(|core, _| core.info_option(table))
        } else {
            let known = self.known.get(&number);
            let shown = self.sockets.iter().filter(|(handle, (socket, _))| {
                socket.charge.user == caller.user || known.is_some_and(|k| k.contains(handle))
            });
            let shown: HashSet<SocketId> = shown.map(|(_, (socket, _))| socket.id).collect();
            self.rds.with_core(|core, _| core.info_option_of(table, |id| shown.contains(&id)))
        };
        Some(result.map_err(|error| error.errno()))
    }
}
