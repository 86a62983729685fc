//! Names that the descriptors do not know, although they know others much like them. Pure.
//!
//! Descriptors need not tell everything that a server offers. So a name is refused only
//! where they describe its service and no such method, or a service whose name is near.

use std::collections::BTreeSet;

/// The most names that an error tells.
const TOLD: usize = 5;

/// What the descriptors name.
#[derive(Debug, Default)]
pub(crate) struct Described {
    /// `/package.Service/Method`
    methods: BTreeSet<String>,
    /// `package.Service`
    services: BTreeSet<String>,
}

// === impl Described ===

impl Described {
    pub(crate) fn of<'a>(methods: impl Iterator<Item = &'a String>) -> Self {
        let methods: BTreeSet<_> = methods.cloned().collect();
        let services = methods.iter().filter_map(|it| parts(it)).map(|it| it.0.to_owned()).collect();
        Self { methods, services }
    }

    /// Which methods or services `name` (`/package.Service/Method`, `/package.Service/` or `/`)
    /// was probably meant for. `None`: it is described, or like nothing that is.
    pub(crate) fn meant_for(&self, name: &str) -> Option<Vec<String>> {
        let (service, method) = parts(name)?;
        if !self.services.contains(service) {
            let near = self.services_near(service)?;
            return Some(near.into_iter().map(|it| format!("/{it}/{method}")).collect());
        }
        if method.is_empty() || self.methods.contains(name) {
            return None;
        }
        let offered = self.methods.iter().filter(|it| parts(it).is_some_and(|it| it.0 == service));
        let (near, others): (Vec<_>, Vec<_>) =
            offered.partition(|it| parts(it).is_some_and(|it| is_near(it.1, method)));
        Some(if near.is_empty() { others } else { near }.into_iter().take(TOLD).cloned().collect())
    }

    /// The described services that `service` is like, where it is none of them.
    pub(crate) fn services_near(&self, service: &str) -> Option<Vec<String>> {
        if self.services.contains(service) {
            return None;
        }
        let near = self.services.iter().filter(|it| is_near(it, service));
        let near: Vec<_> = near.take(TOLD).cloned().collect();
        (!near.is_empty()).then_some(near)
    }
}

/// `package.Service` and `Method`, which may be empty.
fn parts(name: &str) -> Option<(&str, &str)> {
    name.strip_prefix('/')?.split_once('/')
}

/// Whether one was probably meant where the other was written: another case, the package
/// forgotten, or up to two letters (one in a short name) that are wrong, missing or too many.
/// Another number is another name: `v1` and `v2` may both be there.
fn is_near(one: &str, other: &str) -> bool {
    let (one, other) = (one.to_lowercase(), other.to_lowercase());
    let last = |name: &str| name.rsplit('.').next() == Some(&*other) && name.contains('.');
    if one == other || last(&one) {
        return true;
    }
    let wordy = |it: &str| it.replace(|letter: char| letter.is_ascii_digit(), "");
    let most = if one.len() < 8 { 1 } else { 2 };
    wordy(&one) != wordy(&other) && distance(&one, &other) <= most
}

/// How many letters must be changed, added or left out (Levenshtein's distance).
fn distance(one: &str, other: &str) -> usize {
    let other: Vec<_> = other.chars().collect();
    let mut row: Vec<_> = (0..=other.len()).collect();
    for (at, letter) in one.chars().enumerate() {
        let mut before = at;
        row[0] = at + 1;
        for (to, counterpart) in other.iter().enumerate() {
            let change = before + usize::from(letter != *counterpart);
            before = row[to + 1];
            row[to + 1] = change.min(before + 1).min(row[to] + 1);
        }
    }
    row[other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described() -> Described {
        let methods = ["/shop.v1.Cart/Get", "/shop.v1.Cart/Add", "/shop.v1.Stock/Reserve"].map(str::to_owned);
        Described::of(methods.iter())
    }

    #[test]
    fn a_name_that_is_described_or_like_nothing_described_passes() {
        for name in [
            "/shop.v1.Cart/Get",
            "/shop.v1.Cart/",
            "/",
            "/grpc.health.v1.Health/Check",
            "/shop.v2.Cart/Get",
            "/bank.v1.Account/Get",
        ] {
            assert_eq!(described().meant_for(name), None, "{name}");
        }
        assert_eq!(Described::default().meant_for("/shop.v1.Cart/Gte"), None);
    }

    #[test]
    fn what_was_probably_meant_is_named() {
        for (name, meant) in [
            ("/shop.v1.Cart/get", &["/shop.v1.Cart/Get"][..]),
            ("/shop.v1.Cart/Ad", &["/shop.v1.Cart/Add"]),
            ("/shop.v1.Cart/Remove", &["/shop.v1.Cart/Add", "/shop.v1.Cart/Get"]),
            ("/shop.v1.Crat/Get", &["/shop.v1.Cart/Get"]),
            ("/shop.v1.cart/", &["/shop.v1.Cart/"]),
            ("/Stock/Reserve", &["/shop.v1.Stock/Reserve"]),
        ] {
            assert_eq!(described().meant_for(name).unwrap_or_default(), meant, "{name}");
        }
        assert_eq!(described().services_near("shop.v1.Stok"), Some(vec!["shop.v1.Stock".to_owned()]));
        assert_eq!(described().services_near(""), None);
    }

    #[test]
    fn the_distance_counts_letters() {
        for (one, other, letters) in
            [("", "abc", 3), ("abc", "abc", 0), ("abc", "abd", 1), ("kitten", "sitting", 3)]
        {
            assert_eq!((distance(one, other), distance(other, one)), (letters, letters), "{one} {other}");
        }
    }
}
