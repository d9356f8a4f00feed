//! The reliable connection: the [`requester`] sends requests and handles responses, the
//! [`responder`] handles requests and sends responses.

pub(crate) mod requester;
pub(crate) mod responder;
