"""The engine: how one attention call is checked, given to a backend and run; users never need to open it.

`call` checks it (`canonicalize`, `Problem`), `dispatch` picks one of `backends` (`choose`), built on
`softmax`, `flash` and, for Hopper GPUs, `hopper`.
"""
