//! Frames of a channel, and the requests and replies in them: whatever is read is written as it was
//! meant.
#![no_main]

use bowline_host_wire::{Frame, HEAD_LEN, Reply, Request};
use libfuzzer_sys::fuzz_target;

fn read(bytes: &[u8]) -> Option<Frame<'_>> {
    let (frame, len) = Frame::parse(bytes).ok()??;
    assert!(len <= bytes.len());
    assert_eq!(len, HEAD_LEN + frame.name.len() + frame.control.len() + frame.payload.len());
    Some(frame)
}

fuzz_target!(|bytes: &[u8]| {
    let Some(frame) = read(bytes) else { return };
    if let Ok(request) = Request::parse(&frame) {
        let emitted = request.emit(0).expect("what was read has lengths that fit");
        let again = emitted.parts().concat();
        let frame = read(&again).expect("a whole frame");
        assert_eq!(Request::parse(&frame), Ok(request));
    }
    if let Ok(reply) = Reply::parse(&frame.head) {
        let head = reply.emit(frame.head.op);
        assert_eq!(Reply::parse(&head), Ok(reply));
    }
});
