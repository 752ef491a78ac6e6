"""Every sentence that reaches an owner or an operator by a notice, in every language."""
