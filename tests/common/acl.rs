//! A real Consul that denies what it is not told to allow.

use tonic_failover::testkit::{Answer, ConsulProcess, Registry};

const MASTER: &str = "7e2c1f0a-51f3-4b6d-9d0e-3c8a4f6b2d11";

pub(crate) struct Guarded {
    pub(crate) consul: ConsulProcess,
    /// With all rights.
    pub(crate) root: Registry,
}

pub(crate) struct Token {
    pub(crate) secret: String,
    accessor: String,
}

impl Guarded {
    /// `None`, loudly, where no Consul is installed.
    pub(crate) async fn start() -> Option<Self> {
        let bin = super::consul_bin()?;
        // From 1.11 on `master` is called `initial_management`.
        let acl =
            format!("acl {{ enabled = true default_policy = \"deny\" tokens {{ master = \"{MASTER}\" }} }}");
        let consul = ConsulProcess::builder(bin).hcl(acl).start().await.unwrap();
        let root = consul.registry().clone().token(MASTER);
        // The first leader may still be setting the tokens up.
        let ready = async {
            while !root.get("/v1/acl/tokens").await.unwrap().status.is_success() {
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(super::SOON, ready).await.expect("the tokens are set up");
        Some(Self { consul, root })
    }

    pub(crate) fn url(&self) -> String {
        self.consul.url()
    }

    /// A policy of this name: its id.
    pub(crate) async fn policy(&self, name: &str, rules: &str) -> String {
        let answer = self.put("/v1/acl/policy", name, rules).await;
        answer.json()["ID"].as_str().unwrap().to_owned()
    }

    pub(crate) async fn change_policy(&self, id: &str, name: &str, rules: &str) {
        self.put(&format!("/v1/acl/policy/{id}"), name, rules).await;
    }

    async fn put(&self, path: &str, name: &str, rules: &str) -> Answer {
        let body = serde_json::json!({ "Name": name, "Rules": rules });
        done(self.root.put(path, body.to_string()).await.unwrap())
    }

    /// A token with the rights of one policy.
    pub(crate) async fn token(&self, policy: &str) -> Token {
        let body = serde_json::json!({ "Policies": [{ "Name": policy }] });
        let answer = done(self.root.put("/v1/acl/token", body.to_string()).await.unwrap()).json();
        let text = |key: &str| answer[key].as_str().unwrap().to_owned();
        Token { secret: text("SecretID"), accessor: text("AccessorID") }
    }

    /// A token with these rules, and no other way to it.
    pub(crate) async fn token_for(&self, name: &str, rules: &str) -> Token {
        self.policy(name, rules).await;
        self.token(name).await
    }

    pub(crate) async fn delete(&self, token: &Token) {
        done(self.root.delete(&format!("/v1/acl/token/{}", token.accessor)).await.unwrap());
    }
}

fn done(answer: Answer) -> Answer {
    assert!(answer.status.is_success(), "{}", answer.text());
    answer
}

/// The policy in the README whose first line begins with these words.
pub(crate) fn in_readme(words: &str) -> String {
    let readme = include_str!("../../README.md");
    let mut blocks = readme.split("```hcl\n").skip(1).filter_map(|it| it.split("```").next());
    let found = blocks.find(|block| block.starts_with(&format!("# {words}")));
    found.unwrap_or_else(|| panic!("the README has no policy for {words}")).to_owned()
}
