//! Receiving by the application. Spec: `docs/spec/rds.md`, section 6.4.

use super::Node;
use crate::api::{Control, Received, RecvOpts};
use crate::error::Error;
use crate::ids::SocketId;
use crate::socket::{LatencyTrace, RecvMsg};
use crate::time::Instant;

impl Node {
    /// Takes the next notification or message, without waiting.
    ///
    /// # Errors
    /// [`Error::BadSocket`]; [`Error::Empty`] when there is nothing.
    pub fn recv(&mut self, now: Instant, id: SocketId, opts: RecvOpts) -> Result<Received, Error> {
        self.now = now;
        let sock = self.sockets.get_mut(id.0).ok_or(Error::BadSocket)?;
        let mut control = Vec::new();
        if opts.want_control && sock.notify_mask != 0 {
            control.push(Control::CongestionUpdate(std::mem::take(&mut sock.notify_mask)));
            return Ok(Received { source: None, data: None, control });
        }
        let msg = if opts.peek { sock.queue.front().cloned() } else { sock.queue.pop_front() };
        let Some(msg) = msg else {
            if opts.want_control
                && sock.zerocopy
                && let Some(done) = sock.completions.pop_front()
            {
                control.push(Control::ZcopyCompletion(done));
                return Ok(Received { source: None, data: None, control });
            }
            return Err(Error::Empty);
        };
        if opts.want_control {
            if let Some(cookie) = msg.rdma_dest {
                control.push(Control::RdmaDest(cookie));
            }
            if let Some(at) = msg.queued_at {
                control.push(Control::Timestamp(at));
            }
            if let (Some(trace), Some(points)) = (sock.latency, &msg.trace) {
                let nanos = intervals(trace, points, now);
                control.push(Control::Latency { trace, nanos });
            }
            // A peek does not consume completions [B-17].
            if sock.zerocopy
                && !opts.peek
                && let Some(done) = sock.completions.pop_front()
            {
                control.push(Control::ZcopyCompletion(done));
            }
        }
        self.stats.recv_delivered += 1;
        self.stats.copy_to_user += msg.data.len() as u64;
        if !opts.peek {
            self.unqueue_from_socket(id, &msg);
        }
        let RecvMsg { from, data, .. } = msg;
        Ok(Received { source: Some(from.to_socket_addr()), data: Some(data), control })
    }
}

/// Intervals between the points 0 to 3 of R-641.
fn intervals(trace: LatencyTrace, points: &[Instant; 3], now: Instant) -> [u64; 3] {
    let [first, complete, queued] = *points;
    let all = [(first, complete), (complete, queued), (queued, now)];
    let mut nanos = [0; 3];
    for (out, position) in nanos.iter_mut().zip(trace.positions).take(usize::from(trace.count)) {
        if let Some((from, to)) = all.get(usize::from(position)) {
            *out = u64::try_from(to.saturating_since(*from).as_nanos()).unwrap_or(u64::MAX);
        }
    }
    nanos
}
