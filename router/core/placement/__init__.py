"""Where a request goes: candidates, price, policies, receipts."""
