"""An engine whose KV blocks have content: it answers rightly only where its blocks hold what they should."""
