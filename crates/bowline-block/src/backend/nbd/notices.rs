//! What is to be said of the connection to an NBD server to those who look after the store.

use std::io::{self, ErrorKind};

use super::table::Cut;

/// What is to be said of the connection.
#[derive(Default)]
pub(super) struct Notices {
    pub(super) texts: Vec<String>,
    /// How often the server has broken the protocol.
    violations: u64,
    /// It has been said that it is lost, and why it is not back.
    is_lost: bool,
    is_explained: bool,
}

impl Notices {
    /// Most texts that are kept until they are taken.
    const MAX: usize = 16;

    fn add(&mut self, text: String) {
        if self.texts.len() < Self::MAX {
            self.texts.push(text);
        }
    }

    pub(super) fn lost(&mut self, error: &io::Error, cut: Cut) {
        let why = match (error.kind(), cut) {
            (ErrorKind::InvalidData, _) => {
                self.violations += 1;
                format!("it has broken the protocol ({} times): {error}", self.violations)
            }
            (_, Cut::Silent) => "it does not answer".to_owned(),
            (_, Cut::ByServer) => "it has closed the connection".to_owned(),
            (_, Cut::Unknown) => error.to_string(),
        };
        self.add(format!("the NBD server is disconnected: {why}"));
        (self.is_lost, self.is_explained) = (true, false);
    }

    pub(super) fn is_refused(&mut self, why: &str) {
        if !self.is_explained {
            self.is_explained = true;
            self.add(format!("the NBD server is not connected again yet: {why}"));
        }
    }

    pub(super) fn is_back(&mut self) {
        if std::mem::take(&mut self.is_lost) {
            self.add("the NBD server is connected again".to_owned());
        }
    }
}
