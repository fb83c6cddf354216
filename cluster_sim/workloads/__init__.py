"""Requests of a simulated run, one after the other by arrival: from published traces, or drawn from a seed.

Where the shapes of the drawn ones come from:
    conversation     the shape of the Mooncake conversation trace (arXiv 2407.00079, FAST 2025): input tokens log-normal
                     with median 6,900 and mean 12,000, output with mean 340; conversations that come back with the
                     prompt of the turn before in front, so that some 40% of the tokens were seen before
    prefix_groups    groups of equal size share a prefix of a given length (FEATHER section 5)
    prefix_tree      groups of groups: each level shares its part of the prefix (FEATHER section 3.2)
    agents           coding agents: a prompt that grows turn by turn and is sometimes rewritten from a point on
                     (github callanjfox/kv-cache-tester: about 70 turns a session, inputs of tens of thousands)
    crawler, anns    sessions of the two retrievers of Stream2LLM (`streaming`): pages that are
                     appended, lists of documents that are replaced
    azure            a table of arrivals and lengths (github Azure/AzurePublicDataset, Splitwise): no prefixes are known
"""
