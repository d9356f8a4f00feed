//! `bowline cm-listen`: shows the connection requests that come in, and refuses them.
//!
//! It answers the first question of a connection that does not come about: does the request
//! arrive, and what does it say?

use bowline_node::{Outcome, log::Duty, signals::Stop, values::number};
use bowline_verbs::ConnRequest;
use serde_json::json;

use super::local::Local;
use super::serving::{Then, serve_each};

/// Text of the refusal.
const REFUSAL: &str = "bowline cm-listen only listens";

/// Show incoming RDMA connection requests, and refuse them.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "To see why a program cannot connect: stop its server, start this on the same \
    --port and let the program try. Exit status: 0 stopped or all shown, 1 failed, 2 usage."
)]
pub(crate) struct Args {
    #[command(flatten)]
    local: Local,
    /// Stop after N requests; 0 means never
    #[arg(short = 'C', long, value_name = "N", default_value = "0", value_parser = number)]
    count: u64,
    /// Print a JSON object for each request
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Outcome {
    let mut seen = 0;
    let (asked, json) = (args.count, args.json);
    // A counted number of requests is the result of the command; an endless listing is a log.
    let duty = if asked == 0 { Duty::Service { json } } else { Duty::Results };
    let stop = Stop::install_with(duty)?;
    serve_each("cm-listen", &args.local, (asked != 1, json), &stop, |_, arrivals, id, request| {
        seen += 1;
        if json {
            say_of_peer!("{}", object(request));
        } else {
            say_of_peer!("{}", text(request));
        }
        arrivals.refuse(id, REFUSAL);
        if seen == asked { Err(super::Ended::Stopped) } else { Ok(Then::Next) }
    })
}

/// The private data without trailing zeroes.
fn data(request: &ConnRequest) -> &[u8] {
    let data = request.private_data.as_slice();
    let end = data.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    data.get(..end).unwrap_or_default()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn text(request: &ConnRequest) -> String {
    let ConnRequest { local, remote, remote_qpn, responder_resources, initiator_depth, .. } =
        request;
    let data = match data(request) {
        [] => "no data".to_owned(),
        data => format!("data {} \"{}\"", hex(data), data.escape_ascii()),
    };
    format!(
        "{remote} to {local}: queue pair {:#08x}, responder resources {responder_resources}, \
         initiator depth {initiator_depth}, {data}; refused",
        remote_qpn.0
    )
}

fn object(request: &ConnRequest) -> serde_json::Value {
    json!({
        "from": request.remote.to_string(),
        "to": request.local.to_string(),
        "queue_pair": request.remote_qpn.0,
        "responder_resources": request.responder_resources,
        "initiator_depth": request.initiator_depth,
        "private_data": hex(data(request)),
    })
}

#[cfg(test)]
mod tests {
    use bowline_verbs::{CmId, Qpn};

    use super::*;

    #[test]
    fn hostile_data_is_shown_and_not_printed() {
        let mut private_data = b"\x1b[2Jbw\"".to_vec();
        private_data.resize(56, 0);
        let request = ConnRequest {
            listener: CmId::default(),
            local: "10.0.0.1:7174".parse().unwrap(),
            remote: "10.0.0.2:40000".parse().unwrap(),
            private_data,
            responder_resources: 16,
            initiator_depth: 1,
            remote_qpn: Qpn(0x123),
        };
        assert_eq!(
            text(&request),
            "10.0.0.2:40000 to 10.0.0.1:7174: queue pair 0x000123, responder resources 16, \
             initiator depth 1, data 1b5b324a627722 \"\\x1b[2Jbw\\\"\"; refused"
        );
        assert_eq!(object(&request)["private_data"], "1b5b324a627722");
        let request = ConnRequest { private_data: vec![0; 56], ..request };
        assert!(text(&request).ends_with("no data; refused"));
    }
}
