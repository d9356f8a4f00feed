//! Detection of a processor that QEMU or Miri emulates.

#![allow(unused_unsafe, reason = "asking the processor is safe since Rust 1.94, and not before")]

use std::arch::x86_64::__cpuid;

/// The first CPUID leaf of hypervisors.
const BELOW: u32 = 0x4000_0000;

/// Tells whether QEMU emulates the processor (TCG), by the signature it reports; with KVM and the
/// like it does not. Miri, which interprets the program, has no instruction to ask with.
pub(crate) fn is_emulated() -> bool {
    if cfg!(miri) {
        return true;
    }
    // SAFETY: every processor of this architecture has the instruction and this leaf.
    let features = unsafe { __cpuid(1) };
    if features.ecx >> 31 == 0 {
        return false;
    }
    // SAFETY: as above; below a system that is not alone there is this leaf.
    let below = unsafe { __cpuid(BELOW) };
    is_qemu([below.ebx, below.ecx, below.edx])
}

fn is_qemu(signature: [u32; 3]) -> bool {
    signature.map(u32::to_le_bytes).as_flattened() == b"TCGTCGTCGTCG"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn emulators_are_known_by_their_signature() {
        let words = |text: &[u8; 12]| {
            [0, 4, 8].map(|at| u32::from_le_bytes(text[at..at + 4].try_into().unwrap()))
        };
        assert!(is_qemu(words(b"TCGTCGTCGTCG")));
        assert!(!is_qemu(words(b"KVMKVMKVM\0\0\0")));
    }
}
