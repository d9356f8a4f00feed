//! Seeds with a history: each showed the bug it is named after.
//!
//! A change of what seeds draw makes them show something else; such a seed is found again by putting
//! the bug back and running many.

/// All of them, oldest bug first: name, seed, what it showed.
pub fn named_seeds() -> &'static [(&'static str, u64, &'static str)] {
    SEEDS
}

const SEEDS: &[(&str, u64, &str)] = &[
    (
        "closed-while-opening",
        2945,
        "a path closed while its session was being opened was connected after",
    ),
    ("closed-while-opening-2", 1055, "the same"),
    (
        "half-a-write-lost",
        742,
        "of a long write the parts acknowledged before the server's death were not sent again",
    ),
    (
        "ids-given-again",
        3033,
        "a server started again gave the id of one disk to another: a path that had not noticed wrote there",
    ),
    (
        "late-not-lost",
        112_991,
        "a write held up on a path that was given up was carried out after a newer one",
    ),
];
