//! bowline.
