"""The endpoints of models that make vectors of texts, or scores of documents."""
