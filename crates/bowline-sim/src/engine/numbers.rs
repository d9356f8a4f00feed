//! Counters of a run, and their sums over many runs.

/// Counters of a run that can be added up over many runs.
pub trait Numbers: Clone + Default {
    /// Adds the numbers of another run.
    fn add(&mut self, other: &Self);
    /// Returns names and values, in the order of the fields.
    fn fields(&self) -> Vec<(&'static str, u64)>;
}

/// Declares a struct of counters, with code to add them up and to show them.
macro_rules! numbers {
    ($(#[$about:meta])* $name:ident { $($(#[$doc:meta])* $field:ident,)+ }) => {
        $(#[$about])*
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct $name {
            $($(#[$doc])* pub $field: u64,)+
        }

        impl $crate::engine::numbers::Numbers for $name {
            fn add(&mut self, other: &Self) {
                $(self.$field += other.$field;)+
            }

            fn fields(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($field), self.$field),)+]
            }
        }
    };
}
pub(crate) use numbers;
