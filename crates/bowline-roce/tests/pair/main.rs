//! Two devices and a wire between them that loses, repeats and delays what it is told to: sections
//! 5 and 6 of the spec together, checklist 5 to 12 and 16.

mod errors;
mod lengths;
mod loss;
mod world;
