//! `rpoll` and `rselect`: sockets and other descriptors together.

use core::ffi::{c_int, c_short};
use core::slice;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::socket::{Inner, Socket, State, arm, find, wait_once};
use super::wait::{Waiting, Waker, poll};
use crate::fails;

/// Events that are reported without being asked for.
const ALWAYS: c_short = libc::POLLERR | libc::POLLHUP | libc::POLLNVAL;
/// `POLLRDNORM` and `POLLWRNORM`, other names for "can be read" and "can be written".
const READ: c_short = libc::POLLIN | libc::POLLRDNORM;
const WRITE: c_short = libc::POLLOUT | libc::POLLWRNORM;
/// Longest wait in one go; then the wait is begun again.
const SLICE: Duration = Duration::from_secs(60);

/// What is the case at a socket.
fn events(inner: &Inner) -> c_short {
    let when = |is_set, events| if is_set { events } else { 0 };
    match &inner.state {
        State::New => WRITE | libc::POLLHUP,
        State::Listening(listener) => when(listener.has_request(), READ),
        State::Connecting(_) => 0,
        State::Connected(connection) => {
            let Some(stream) = &connection.stream else { return libc::POLLERR };
            let is_broken = connection.is_broken;
            let is_at_end = stream.is_at_end() || inner.is_read_shut;
            let is_closed = stream.is_closed_for_sends();
            when(stream.readable() > 0 || is_at_end || is_broken, READ)
                | when(stream.is_writable() || is_closed || is_broken, WRITE)
                | when(stream.is_at_end(), libc::POLLRDHUP)
                | when(stream.is_at_end() && stream.has_peer_gone() || is_broken, libc::POLLHUP)
                | when(is_broken, libc::POLLERR)
        }
        State::Ended => READ | WRITE | libc::POLLHUP | when(inner.error != 0, libc::POLLERR),
        State::Datagrams(datagrams) => {
            when(datagrams.is_readable(), READ) | when(datagrams.is_writable(), WRITE)
        }
    }
}

/// An entry of the program's list that is a socket.
struct Polled {
    socket: Arc<Socket>,
    index: usize,
}

/// Looks at all sockets; returns how many have something to report.
fn look(
    sockets: &[Polled],
    fds: &mut [libc::pollfd],
    own: Option<&Arc<Waker>>,
    arms: bool,
) -> c_int {
    let mut ready = 0;
    for Polled { socket, index } in sockets {
        let mut inner = socket.lock();
        if arms {
            arm(&inner);
        }
        socket.progress(&mut inner, own);
        let entry = &mut fds[*index];
        entry.revents = events(&inner) & (entry.events | ALWAYS);
        ready += c_int::from(entry.revents != 0);
    }
    ready
}

/// The other descriptors, with that of the thread in front. Sockets have no entry, nor have those
/// that the program wants to be skipped.
fn others(fds: &[libc::pollfd], sockets: &[Polled], waker: Option<&Waker>) -> Vec<libc::pollfd> {
    let own = waker.map_or(-1, Waker::raw);
    let mut all = vec![libc::pollfd { fd: own, events: libc::POLLIN, revents: 0 }];
    all.extend(fds.iter().map(|entry| libc::pollfd { revents: 0, ..*entry }));
    for Polled { index, .. } in sockets {
        all[index + 1].fd = -1;
    }
    all
}

/// Polls sockets and other descriptors; `None`: without end.
fn poll_all(fds: &mut [libc::pollfd], limit: Option<Duration>) -> Result<c_int, c_int> {
    let sockets: Vec<Polled> = fds
        .iter()
        .enumerate()
        .filter_map(|(index, entry)| Some(Polled { socket: find(entry.fd)?, index }))
        .collect();
    if sockets.is_empty() {
        return poll(fds, limit);
    }
    let has_others = fds.len() > sockets.len();
    let take = |fds: &mut [libc::pollfd], others: &[libc::pollfd], ready: c_int| {
        let mut ready = ready;
        for (entry, other) in fds.iter_mut().zip(&others[1..]) {
            if other.fd >= 0 {
                entry.revents = other.revents;
                ready += c_int::from(other.revents != 0);
            } else if entry.fd < 0 {
                entry.revents = 0;
            }
        }
        ready
    };
    let now = |fds: &mut [libc::pollfd], ready| -> Result<c_int, c_int> {
        if !has_others {
            return Ok(ready);
        }
        let mut others = others(fds, &sockets, None);
        poll(&mut others, Some(Duration::ZERO))?;
        Ok(take(fds, &others, ready))
    };
    let ready = look(&sockets, fds, None, false);
    let ready = now(fds, ready)?;
    if ready > 0 || limit == Some(Duration::ZERO) {
        return Ok(ready);
    }
    let end = limit.and_then(|limit| Instant::now().checked_add(limit));
    let waker = Waker::own().ok_or(libc::ENOMEM)?;
    let _waiting: Vec<Waiting<'_>> =
        sockets.iter().map(|polled| Waiting::new(&polled.socket.signal, &waker)).collect();
    // One socket alone waits in the device's own way.
    let is_alone = sockets.len() == 1 && !has_others;
    let mut is_armed = !is_alone;
    loop {
        waker.clear();
        let ready = look(&sockets, fds, Some(&waker), is_armed);
        let ready = now(fds, ready)?;
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        if ready > 0 || left == Some(Duration::ZERO) {
            return Ok(ready);
        }
        if is_alone {
            let cq = sockets[0].socket.lock().cq();
            let slice = left.map_or(SLICE, |left| left.min(SLICE));
            is_armed = !wait_once(cq, &waker, is_armed, slice);
        } else {
            poll(&mut others(fds, &sockets, Some(&waker)), left)?;
        }
    }
}

fn outcome(result: Result<c_int, c_int>) -> c_int {
    result.unwrap_or_else(|errno| {
        fails(errno);
        -1
    })
}

/// # Safety
/// The list has `count` entries.
#[unsafe(no_mangle)]
unsafe extern "C" fn rpoll(
    fds: *mut libc::pollfd,
    count: libc::nfds_t,
    timeout_ms: c_int,
) -> c_int {
    let limit = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
    let Ok(count) = usize::try_from(count) else { return outcome(Err(libc::EINVAL)) };
    if count > 0 && fds.is_null() {
        return outcome(Err(libc::EFAULT));
    }
    let fds = if count == 0 {
        &mut []
    } else {
        // SAFETY: as this function's.
        unsafe { slice::from_raw_parts_mut(fds, count) }
    };
    outcome(poll_all(fds, limit))
}

/// The descriptors of a set, which may be null.
fn has(set: *const libc::fd_set, fd: c_int) -> bool {
    // SAFETY: null is not looked at, and the descriptor is below `FD_SETSIZE`.
    !set.is_null() && unsafe { libc::FD_ISSET(fd, set) }
}

#[unsafe(no_mangle)]
extern "C" fn rselect(
    count: c_int,
    read: *mut libc::fd_set,
    write: *mut libc::fd_set,
    except: *mut libc::fd_set,
    timeout: Option<&libc::timeval>,
) -> c_int {
    if !(0..=libc::FD_SETSIZE as c_int).contains(&count) {
        return outcome(Err(libc::EINVAL));
    }
    let limit = match timeout.map(|at| (u64::try_from(at.tv_sec), u32::try_from(at.tv_usec))) {
        None => None,
        Some((Ok(seconds), Ok(micros))) => {
            Some(Duration::from_secs(seconds) + Duration::from_micros(micros.into()))
        }
        Some(_) => return outcome(Err(libc::EINVAL)),
    };
    let asked = [(read, READ), (write, WRITE), (except, libc::POLLPRI)];
    let mut fds: Vec<libc::pollfd> = (0..count)
        .filter_map(|fd| {
            let events = asked.iter().filter(|(set, _)| has(*set, fd)).map(|(_, events)| events);
            let events = events.fold(0, |all, events| all | events);
            (events != 0).then_some(libc::pollfd { fd, events, revents: 0 })
        })
        .collect();
    if let Err(errno) = poll_all(&mut fds, limit) {
        return outcome(Err(errno));
    }
    if fds.iter().any(|entry| entry.revents & libc::POLLNVAL != 0) {
        return outcome(Err(libc::EBADF));
    }
    let means = [READ | libc::POLLHUP | libc::POLLERR, WRITE | libc::POLLERR, libc::POLLPRI];
    let mut number = 0;
    for ((set, wanted), means) in asked.into_iter().zip(means) {
        if set.is_null() {
            continue;
        }
        // SAFETY: the program's set.
        unsafe { libc::FD_ZERO(set) };
        for entry in fds.iter().filter(|entry| entry.events & wanted != 0) {
            if entry.revents & means != 0 {
                // SAFETY: as above, and the descriptor is below `FD_SETSIZE`.
                unsafe { libc::FD_SET(entry.fd, set) };
                number += 1;
            }
        }
    }
    number
}
