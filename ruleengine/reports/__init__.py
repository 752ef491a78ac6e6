"""`gpuwarden report`: what the fleet did over days, as one document, page, table or mail."""
