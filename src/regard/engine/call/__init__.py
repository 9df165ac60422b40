"""One call, checked and filled in: `canonicalize` makes a `Problem`; `hooks` tell watchers what ran."""
