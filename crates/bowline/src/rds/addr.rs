//! What calls take for addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use super::Error;

/// An address and an RDS port: a [`SocketAddr`], a pair of [an address](ToIp) and a port, or a text
/// such as `10.0.0.1:4000` or `[fd00::1]:4000`. Names of hosts are not looked up.
///
/// Since all of these are taken as they are, nothing has to be converted, and `.into()` or
/// `.parse()?` as an argument does not say into what: leave it out.
///
/// ```
/// use bowline::rds::ToAddr;
///
/// # fn main() -> Result<(), bowline::rds::Error> {
/// assert_eq!("10.0.0.1:4000".to_addr()?, ([10, 0, 0, 1], 4000).to_addr()?);
/// assert_eq!(("fd00::1", 4000).to_addr()?, "[fd00::1]:4000".to_addr()?);
/// # Ok(())
/// # }
/// ```
pub trait ToAddr: sealed::Sealed {
    /// Returns it as the standard library has it.
    ///
    /// # Errors
    /// `EINVAL` for a text that is not an address and a port.
    fn to_addr(self) -> Result<SocketAddr, Error>;
}

/// An address without a port: an [`IpAddr`], the numbers of one, or a text such as `10.0.0.1` or
/// `fd00::1`. Names of hosts are not looked up.
pub trait ToIp: sealed::Sealed {
    /// Returns it as the standard library has it.
    ///
    /// # Errors
    /// `EINVAL` for a text that is not an address.
    fn to_ip(self) -> Result<IpAddr, Error>;
}

mod sealed {
    /// Keeps the traits to what is here.
    pub trait Sealed {}
}

macro_rules! as_they_are {
    ($trait:ident, $method:ident, $into:ident: $($of:ty),*) => {
        $(
            impl sealed::Sealed for $of {}

            impl $trait for $of {
                #[inline]
                fn $method(self) -> Result<$into, Error> {
                    Ok(self.into())
                }
            }
        )*
    };
}

as_they_are!(ToIp, to_ip, IpAddr: IpAddr, Ipv4Addr, Ipv6Addr, [u8; 4], [u16; 8]);
as_they_are!(ToAddr, to_addr, SocketAddr: SocketAddr, SocketAddrV4, SocketAddrV6);

impl sealed::Sealed for &str {}
impl sealed::Sealed for &String {}
impl<I: ToIp> sealed::Sealed for (I, u16) {}

impl ToIp for &str {
    fn to_ip(self) -> Result<IpAddr, Error> {
        self.parse().map_err(|_| Error::not_an_address(self, "an address, as 10.0.0.1 or fd00::1"))
    }
}

impl ToIp for &String {
    fn to_ip(self) -> Result<IpAddr, Error> {
        self.as_str().to_ip()
    }
}

impl ToAddr for &str {
    fn to_addr(self) -> Result<SocketAddr, Error> {
        let wanted = "an address and a port, as 10.0.0.1:4000 or [fd00::1]:4000";
        self.parse().map_err(|_| Error::not_an_address(self, wanted))
    }
}

impl ToAddr for &String {
    fn to_addr(self) -> Result<SocketAddr, Error> {
        self.as_str().to_addr()
    }
}

impl<I: ToIp> ToAddr for (I, u16) {
    #[inline]
    fn to_addr(self) -> Result<SocketAddr, Error> {
        Ok(SocketAddr::new(self.0.to_ip()?, self.1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rds::ErrorKind;

    #[test]
    fn a_text_that_is_no_address_is_told_with_what_was_wanted() {
        let error = "localhost:4000".to_addr().expect_err("no address");
        assert_eq!(error.kind(), ErrorKind::BadAddress);
        assert_eq!(error.errno(), 22);
        assert_eq!(
            error.to_string(),
            "\"localhost:4000\" is not an address and a port, as 10.0.0.1:4000 or [fd00::1]:4000"
        );
        assert!("10.0.0.1".to_addr().is_err(), "without a port");
        assert!(("10.0.0.1:4000", 5).to_addr().is_err(), "two ports");
    }
}
