"""Where a request goes: candidates, their prices, the policies that choose, receipts, what answers teach."""
