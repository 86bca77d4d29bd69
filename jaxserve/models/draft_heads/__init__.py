"""Heads that draft: one layer each, which gets a model's hidden states besides the tokens.

At position t a head joins the embedding of token t + 1 with the *features* of the model at t, and predicts token t + 2.
At positions that the model hasn't computed yet, the head's own output takes the place of the features.

A head's module has `abstract(model, dtype)` as a family has, and

- `features(model, params, of_model)`: the features, `[tokens, dim]`, from the output of the model's layers;
- `forward(model, params, embedded, features, batch, kv, backend)`: the output of its layer, whose hidden states are
  the features that it computes;
- `logits(model, params, features, of_model)`: its logits, where `of_model` is the head of the model.
"""
