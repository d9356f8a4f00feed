//! Cells of programs that embed no node.

use super::{Builder, Entry, Figure, bytes};
use crate::cell::{Kind, Subject, Wait};

impl Builder<'_> {
    /// Adds them, where they were asked for.
    pub(super) fn host(&mut self) {
        if !self.options.host {
            return;
        }
        self.two_nodes();
        [64, 8192].into_iter().for_each(|size| self.one_node(size));
        [Wait::Spin, Wait::Sleep].into_iter().for_each(|wait| self.one_node_rtt(wait));
        self.python();
        self.pipe();
    }

    /// Between two nodes, beside programs that embed theirs.
    fn two_nodes(&mut self) {
        let size = 8192;
        let entries =
            [Subject::Bowline, Subject::Host].map(|s| self.entry(s, Kind::Stream, size, 1));
        let title = format!("one way, {}, programs of two nodes", bytes(size));
        self.push(format!("host-stream/{size}"), title, Figure::Rate, entries.into());

        let size = 64;
        let mut entries =
            [Subject::Bowline, Subject::Host].map(|s| self.entry(s, Kind::Rtt, size, 1));
        entries[0].cell.wait = Wait::Sleep;
        let title = format!("round trip, {}, programs of two nodes, both sleeping", bytes(size));
        self.push(format!("host-rtt-sleep/{size}"), title, Figure::Latency, entries.into());
    }

    /// Within one node, with the buffers that a program finds and with larger ones, beside unix
    /// sockets.
    fn one_node(&mut self, size: usize) {
        let mut default_buffer = self.entry(Subject::HostOne, Kind::Stream, size, 1);
        default_buffer.cell.buffer = 0;
        let large = self.entry(Subject::HostOne, Kind::Stream, size, 1);
        let large = Entry { label: format!("host-one-{}M", large.cell.buffer >> 20), ..large };
        let entries = vec![self.entry(Subject::Seqp, Kind::Stream, size, 1), default_buffer, large];
        let title = format!("one way, {}, programs of one node", bytes(size));
        self.push(format!("host-one/{size}"), title, Figure::Rate, entries);
    }

    fn one_node_rtt(&mut self, wait: Wait) {
        let size = 64;
        let mut subjects = vec![Subject::Futex, Subject::HostOne];
        if wait == Wait::Sleep {
            subjects.insert(1, Subject::Seqp);
        }
        let mut entries: Vec<Entry> =
            subjects.into_iter().map(|s| self.entry(s, Kind::Rtt, size, 1)).collect();
        entries.iter_mut().for_each(|entry| entry.cell.wait = wait);
        let how = if wait == Wait::Spin { "polling" } else { "sleeping" };
        let title = format!("round trip, {}, programs of one node, both {how}", bytes(size));
        self.push(format!("host-one-rtt-{}/{size}", wait.name()), title, Figure::Latency, entries);
    }

    fn python(&mut self) {
        let size = 8192;
        let subjects = [Subject::TcpPython, Subject::HostPython];
        let entries = subjects.map(|s| self.entry(s, Kind::Stream, size, 1));
        let title = format!("one way, {}, programs in Python", bytes(size));
        self.push(format!("host-python/{size}"), title, Figure::Rate, entries.into());
    }

    fn pipe(&mut self) {
        let size = 64;
        let subjects = [Subject::Pipe, Subject::PipePreloaded];
        let entries = subjects.map(|s| self.entry(s, Kind::Stream, size, 1));
        let title = format!("calls of write and read on a pipe, {}, one process", bytes(size));
        self.push(format!("host-pipe/{size}"), title, Figure::Rate, entries.into());
    }
}
