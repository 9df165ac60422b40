"""Run one call: `call` checks it, `dispatch` picks one of `backends`, built on `softmax` and `flash`."""
