//! Option `--rdma` of the commands that have a node of their own.

use std::sync::Arc;

use bowline::rds::Node;
use bowline_node::{
    Failure, Outcome,
    over_rdma::{DeviceName, Devices},
    start_node,
    values::Address,
};
use bowline_verbs::Device;

/// The option `--rdma` of commands with a node of their own, which has one address.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct RdmaOption {
    /// Speak RDS over RDMA: over the soft RoCE device at this side's address (UDP port 4791), or
    /// over a device of rdma-core, such as rxe0
    #[arg(long, value_name = "DEVICE", num_args = 0..=1, require_equals = true, default_missing_value = "soft")]
    rdma: Option<DeviceName>,
}

impl RdmaOption {
    /// Returns the soft device at the address of the command's node.
    pub(crate) const fn soft() -> Self {
        Self { rdma: Some(DeviceName::Soft(None)) }
    }

    /// Tells whether the command is to use RDMA.
    pub(crate) fn is_wanted(&self) -> bool {
        self.rdma.is_some()
    }

    /// Starts a node at an address, over RDMA if that is wanted.
    pub(crate) fn start_node(&self, local: Address) -> Outcome<Node> {
        if let Some(DeviceName::Soft(Some(other))) = self.rdma
            && other != local
        {
            return Err(Failure::usage(format!(
                "--rdma=soft@{other}: this side has the address {local}; leave out @{other}"
            )));
        }
        let devices = Devices::new(self.rdma.iter().cloned().collect(), &mut vec![local])?;
        if self.is_wanted() && !devices.covers(local) {
            return Err(Failure::failed(format!(
                "the device of --rdma does not have the address {local}; see `bowline devices`"
            )));
        }
        let soft = devices.open_soft(|_| {})?.map(|device| device as Arc<dyn Device>);
        start_node(devices.add_to(Node::builder(), soft), &[local])
    }
}
