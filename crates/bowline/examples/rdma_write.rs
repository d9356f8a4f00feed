//! RDMA: one device writes into the memory of another. Both are of this process, but nothing here
//! would differ in two processes or on two machines: what one side has to know of the other goes
//! along with the connection.

use std::sync::Arc;
use std::time::Duration;

use bowline::verbs::{
    Access, Buffer, CmEvent, Completion, ConnParam, CqId, Device, MrKeys, QpAttr, QpCap, QpInit,
    QpState, QpType, Qpn, RecvWr, Remote, SendFlags, SendOp, SendWr, Sge, SoftConfig, SoftDevice,
    Status,
};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const LEN: usize = 4096;
const PORT: u16 = 7500;
const PATIENCE: Duration = Duration::from_secs(10);

/// One side: a device with a queue pair, and memory that it has registered.
struct Side {
    device: SoftDevice,
    cq: CqId,
    qp: Qpn,
    memory: Arc<Buffer>,
    keys: MrKeys,
}

impl Side {
    fn open(address: [u8; 4]) -> Result<Self> {
        let config = SoftConfig { addrs: vec![address.into()], ..SoftConfig::default() };
        let device = SoftDevice::open(config)?;
        let pd = device.alloc_pd()?;
        let cq = device.create_cq(16)?;
        let cap = QpCap::default();
        let qp_type = QpType::Rc;
        let init =
            QpInit { pd, send_cq: cq, recv_cq: cq, srq: None, qp_type, cap, sq_sig_all: false };
        let qp = device.create_qp(&init)?;
        // What the peer may do with this side's memory. Connecting does the rest.
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let (state, rights) = (Some(QpState::Init), Some(access));
        device.modify_qp(qp, &QpAttr { state, access: rights, ..QpAttr::default() })?;
        let memory = Arc::new(Buffer::new(LEN)?);
        let keys = device.reg_mr(pd, &memory, 0, LEN, None, access)?;
        Ok(Self { device, cq, qp, memory, keys })
    }

    /// What goes along with the connection: where this side's memory is, and the key to it.
    fn param(&self) -> ConnParam {
        let (addr, rkey) = (self.memory.addr().to_be_bytes(), self.keys.rkey.to_be_bytes());
        let private_data = [&addr[..], &rkey].concat();
        ConnParam { qpn: self.qp, private_data, ..ConnParam::default() }
    }

    fn event(&self) -> Result<CmEvent> {
        Ok(self.device.cm_event(PATIENCE)?)
    }

    /// Waits for the next request that has ended.
    fn completion(&self) -> Result<Completion> {
        let mut ended = Vec::new();
        while self.device.poll_cq(self.cq, &mut ended, 1)? == 0 {
            if !self.device.wait_cq(self.cq, false, Some(PATIENCE))? {
                return Err("nothing has ended".into());
            }
        }
        match ended[0].status {
            Status::Success => Ok(ended[0]),
            status => Err(format!("request {} ended with {status:?}", ended[0].wr_id).into()),
        }
    }
}

/// Reads what [`Side::param`] has said.
fn place(private_data: &[u8]) -> Result<Remote> {
    let (addr, rest) = private_data.split_first_chunk().ok_or("no address came")?;
    let rkey = rest.first_chunk().ok_or("no key came")?;
    Ok(Remote { addr: u64::from_be_bytes(*addr), rkey: u32::from_be_bytes(*rkey) })
}

fn main() -> Result<()> {
    let writer = Side::open([127, 77, 3, 1])?;
    let target = Side::open([127, 77, 3, 2])?;
    let at = ([127, 77, 3, 2], PORT).into();

    // The target's memory is written without a word; an immediate tells it that all is there, and
    // takes a receive.
    target.device.listen(at)?;
    target.device.post_recv(target.qp, &[RecvWr { id: 1, sges: &[] }]).map_err(|(_, why)| why)?;

    writer.device.connect(None, at, &writer.param())?;
    let CmEvent::ConnectRequest { id, .. } = target.event()? else {
        return Err("something else than a connection came".into());
    };
    target.device.accept(id, &target.param())?;
    let CmEvent::Established { private_data, .. } = writer.event()? else {
        return Err("the connection was refused".into());
    };
    let remote = place(&private_data)?;

    writer.memory.write(0, b"written without asking");
    let sge = Sge { addr: writer.memory.addr(), len: LEN as u32, lkey: writer.keys.lkey };
    let write = SendWr {
        id: 2,
        op: SendOp::WriteImm(remote, 42),
        sges: &[sge],
        inline: &[],
        flags: SendFlags::SIGNALED,
    };
    writer.device.post_send(writer.qp, &[write]).map_err(|(_, why)| why)?;
    assert_eq!(writer.completion()?.wr_id, 2, "the target has it");

    let completion = target.completion()?;
    assert_eq!((completion.wr_id, completion.imm), (1, Some(42)));
    let mut read = [0; 22];
    target.memory.read(0, &mut read);
    println!("{}", String::from_utf8_lossy(&read));
    assert_eq!(&read, b"written without asking");
    Ok(())
}
