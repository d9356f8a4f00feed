//! The reliable connection: [`requester`] sends requests and takes the answers, [`responder`] the
//! other way round.

pub(crate) mod requester;
pub(crate) mod responder;
