//! The choice of a bad network, in options and in the file.

use bowline_roce_driver::{Impairment, Impairments};
use serde::{Deserialize, Deserializer, de};

use crate::{Failure, Outcome};

/// Options of a network that is bad by choice.
#[cfg(feature = "options")]
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ImpairOptions {
    /// Make the network bad for RDMA, for tests: any of loss=1%, duplicate=1%, reorder=0.1%,
    /// corrupt=0.01%, ce=1% and delay=2ms±1ms, separated by commas; with peer=ADDRESS, way=in or
    /// way=out only for packets of that peer or direction. May be repeated; the first that fits a
    /// packet counts. Where both ends do so it adds up. RDS over TCP is left alone
    #[arg(long, value_name = "LIST")]
    impair: Vec<Impairment>,
    /// What chooses the packets of --impair: with the same number the n-th packet between two
    /// addresses meets the same [default: a random one, which is printed]
    #[arg(long, value_name = "NUMBER", requires = "impair")]
    seed: Option<u64>,
}

#[cfg(feature = "options")]
impl ImpairOptions {
    /// Returns what these options say, if they were given.
    ///
    /// # Errors
    /// They are too many.
    pub fn settings(&self) -> Outcome<Option<Impairments>> {
        chosen(&self.impair, self.seed)
    }

    /// Lays these options over what a file says.
    pub(crate) fn over(self, impair: &mut Vec<Impairment>, seed: &mut Option<u64>) {
        if !self.impair.is_empty() {
            (*impair, *seed) = (self.impair, self.seed);
        }
    }
}

/// Returns a choice, with a seed where none was given.
pub(crate) fn chosen(all: &[Impairment], seed: Option<u64>) -> Outcome<Option<Impairments>> {
    if all.is_empty() {
        return Ok(None);
    }
    let seed = seed.unwrap_or_else(bowline_base::entropy::random_u64);
    let made = Impairments::new(all.to_vec(), seed);
    made.map(Some).map_err(|error| Failure::usage(format!("impair: {error}")))
}

/// Returns a line by which a user finds the same network again.
pub fn line(settings: &Impairments) -> String {
    let all: Vec<String> = settings.all().iter().map(|one| format!("--impair '{one}'")).collect();
    format!("a bad network: {} --seed {}", all.join(" "), settings.seed())
}

/// Reads the texts of a file.
pub(crate) fn texts<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Impairment>, D::Error> {
    let texts = Vec::<String>::deserialize(from)?;
    texts.iter().map(|text| text.parse()).collect::<Result<_, _>>().map_err(de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_are_taken_than_a_welcome_holds() {
        let all = vec!["loss=1%".parse::<Impairment>().unwrap(); 33];
        assert_eq!(chosen(&all[..32], Some(7)).unwrap().map(|made| made.seed()), Some(7));
        assert!(
            matches!(chosen(&all, None), Err(Failure::Usage(why)) if why.contains("at most 32"))
        );
    }
}
