//! The hash that spreads pairs of sockets over paths, [R-2040], where a kernel looks at the
//! sender alone.

/// Jenkins' lookup3 for one 32-bit word, with start value 0, as a kernel uses for all sockets but
/// its first, [B-12].
pub(crate) fn path_hash(port: u16) -> u32 {
    let v = 0xdead_beef_u32.wrapping_add(4);
    let mut a = u32::from(port).wrapping_add(v);
    let mut b = v;
    let mut c = v;
    c = (c ^ b).wrapping_sub(b.rotate_left(14));
    a = (a ^ c).wrapping_sub(c.rotate_left(11));
    b = (b ^ a).wrapping_sub(a.rotate_left(25));
    c = (c ^ b).wrapping_sub(b.rotate_left(16));
    a = (a ^ c).wrapping_sub(c.rotate_left(4));
    b = (b ^ a).wrapping_sub(a.rotate_left(14));
    (c ^ b).wrapping_sub(b.rotate_left(24))
}

#[cfg(test)]
mod tests {
    use super::path_hash;

    // tests
    #[test]
    fn agrees_with_the_kernels_vectors() {
        for (port, hash) in [
            (1, 0x72a8_2a9b),
            (2, 0xee62_6cca),
            (1000, 0x640c_7a64),
            (4000, 0xca59_0529),
            (10000, 0x8977_8e2b),
            (20000, 0x37cb_1b1d),
            (65535, 0x1e1e_8ecb),
        ] {
            assert_eq!(path_hash(port), hash, "port {port}");
        }
    }
}
