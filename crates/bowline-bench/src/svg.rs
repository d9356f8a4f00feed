//! stub
pub(crate) fn page(
    _: &crate::head::Head,
    _: &[String],
    _: &[crate::plan::Block],
    _: &crate::results::Results,
    _: &[crate::targets::Outcome],
) -> String {
    String::new()
}
