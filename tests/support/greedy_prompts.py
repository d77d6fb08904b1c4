"""Prompts on which greedy decoding is compared with transformers: chat, code, languages, lengths at block borders."""

BLOCK_BORDER_LENGTHS = (15, 16, 17, 32)
LONG_PROMPT_TOKENS = 2000
NUM_LEDGER_LINES = 90

CHATS: dict[str, list[tuple[str, str]]] = {
    "chat: capital": [("user", "What is the capital of France?")],
    "chat: system prompt": [
        ("system", "You are a careful librarian. Answer in two sentences."),
        ("user", "How should old paper maps be stored?"),
    ],
    "chat: several turns": [
        ("user", "My name is Ines and I repair clocks."),
        ("assistant", "Nice to meet you, Ines. What kind of clocks do you repair?"),
        ("user", "Mostly tower clocks. Which parts of them wear out first?"),
    ],
    "chat: list": [("user", "Give me five ideas for a rainy afternoon, one line each.")],
    "chat: arithmetic": [("user", "A train leaves at 9:40 and arrives at 13:05. How long does it travel?")],
    "chat: rewrite": [("user", "Make this polite: Send me the report now, I have been waiting for days.")],
    "chat: explain": [("user", "Explain to a child why the sky is blue and the sunset is red.")],
}

TEXTS: dict[str, str] = {
    "code: python": 'def is_prime(n: int) -> bool:\n    """Whether n is a prime number."""\n    if n < 2:\n',
    "code: c": "#include <stdio.h>\n\nint main(void) {\n    for (int i = 1; i <= 100; i++) {\n"
    "        if (i % 15 == 0)\n",
    "code: sql": "-- The ten customers with the highest total of orders in 2023\n"
    "SELECT c.name, SUM(o.total) AS total\nFROM",
    "code: json": '{"name": "Ada", "born": 1815, "fields": ["mathematics", "computing"], "works": [{"title":',
    "code: javascript": "// Debounce: calls fn once, delay ms after the last call\nfunction debounce(fn, delay) {\n",
    "language: german": "Der Zug nach München fährt heute später ab, weil",
    "language: french": "Pour préparer une bonne soupe à l'oignon, il faut d'abord",
    "language: spanish": "La ciudad antigua estaba rodeada de murallas y, cuando llegaba la noche,",
    "language: polish": "Zimą dni są krótkie, dlatego ludzie",
    "language: russian": "Москва — столица России, а Санкт-Петербург",
    "language: greek": "Η θάλασσα ήταν ήρεμη και ο ουρανός",
    "language: chinese": "今天天气很好,我们一起去公园",
    "language: japanese": "むかしむかし、あるところに",
    "language: arabic": "في صباح يوم جديد خرج",
    "text: story": "The lighthouse keeper had not spoken to anyone for three weeks when, one morning, a small boat",
    "text: science": "Photosynthesis is the process by which plants turn light into chemical energy. "
    "In the first stage,",
    "text: emoji": "Party list 🎉: 1) cake 🍰 2) balloons 🎈 3)",
    "text: recipe": "Ingredients:\n- 200 g flour\n- 2 eggs\n- 300 ml milk\n\nMethod:\n1.",
}

BORDER_TEXT = (
    "Every morning the baker opened the shop before sunrise, lit the oven, and wrote the price of bread on a slate "
    "beside the door, so that nobody had to ask what a loaf would cost that day."
)


def ledger() -> str:
    """A long text that does not repeat itself, and a question about it at its end."""
    goods = ("barley", "copper wire", "lamp oil", "rope", "window glass", "salt", "paper", "tar", "wool", "nails")
    places = ("the north quay", "the old mill", "Harbour Street", "the customs house", "the upper market")
    lines = [
        f"Entry {n}: {7 * n % 83 + 3} crates of {goods[n * n % 10]} went to {places[3 * n % 5]}, "
        f"paid with {13 * n % 97 + 1} crowns."
        for n in range(1, NUM_LEDGER_LINES + 1)
    ]
    return "The harbour master's ledger.\n" + "\n".join(lines) + "\n\nIn short, the ledger of the harbour master shows"
