"""From text to batches: `loopformer prepare` writes token shards, the loader reads them in a fixed order.

from loopformer.data.prepare import prepare         # text → shards
from loopformer.data.shards import TokenData        # shards → memory-mapped tokens
from loopformer.data.loader import Loader           # tokens → batches
from loopformer.data.tokenizer import Tokenizer     # text ↔ ids, chats → examples
from loopformer.data.generated import open_data     # these tokens, or words and stories that are drawn
"""
