//! The hash that maps each port to a path.

/// Jenkins lookup3 of one word with initial value 0, [R-411].
pub(super) fn port_hash(port: u16) -> u32 {
    let v = 0xdead_beef_u32.wrapping_add(4);
    let (mut a, mut b, mut c) = (u32::from(port).wrapping_add(v), v, v);
    c = (c ^ b).wrapping_sub(b.rotate_left(14));
    a = (a ^ c).wrapping_sub(c.rotate_left(11));
    b = (b ^ a).wrapping_sub(a.rotate_left(25));
    c = (c ^ b).wrapping_sub(b.rotate_left(16));
    a = (a ^ c).wrapping_sub(c.rotate_left(4));
    b = (b ^ a).wrapping_sub(a.rotate_left(14));
    (c ^ b).wrapping_sub(b.rotate_left(24))
}

#[cfg(test)]
#[cfg(test)]
mod tests {
    use super::*;

    // tests
    #[test]
    fn hash_matches_the_vectors_of_the_rules() {
        for (port, hash) in [(1, 0x72a8_2a9b), (4000, 0xca59_0529), (65535, 0x1e1e_8ecb)] {
            assert_eq!(port_hash(port), hash, "port {port}");
        }
    }
}
