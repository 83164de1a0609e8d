"""The vocabulary of all examples: closed lists, so that a small tokenizer holds each word as one token or two."""

from __future__ import annotations

import random


def _split(words: str) -> tuple[str, ...]:
    return tuple(words.split())


NAMES = _split("""
Adam Agnes Albert Alice Amanda Amy Andrea Andrew Angela Anna Anthony Arthur Audrey Barbara Beatrice Benjamin Bernard
Bertha Betty Brenda Brian Bruce Calvin Carl Carmen Caroline Catherine Cecil Charles Charlotte Chloe Christine Clara
Claire Clement Conrad Cornelia Craig Cynthia Daniel David Deborah Dennis Diana Donald Donna Dorothy Douglas Duncan Edgar
Edith Edward Eleanor Elena Elizabeth Ellen Elmer Emily Emma Eric Ernest Esther Ethan Eugene Eva Evelyn Felix Fiona Flora
Florence Frances Frank Frederick Gabriel Gary George Gerald Gilbert Gloria Gordon Grace Graham Gregory Gwen Hannah
Harold Harriet Harry Hazel Heather Hector Helen Henry Herbert Homer Hope Howard Hubert Hugh Ida Ingrid Irene Iris Isaac
Isabel Ivan Jacob James Jane Janet Jasmine Jason Jean Jennifer Jeremy Jesse Jessica Joan Joel John Jonathan Joseph
Joyce Judith Julia Julian Karen Karl Katherine Keith Kenneth Kevin Laura Lawrence Leo Leonard Leslie Lewis Lillian Linda
Lisa Louis Lucas Lucy Luther Lydia Mabel Magnus Marcus Margaret Maria Marion Marjorie Mark Martha Martin Mary Matthew
Maurice Maxwell Melissa Michael Mildred Miriam Monica Morris Nancy Naomi Nathan Neil Nicholas Nina Nora Norman Oliver
Olivia Oscar Pamela Patricia Patrick Paul Paula Peter Philip Phoebe Ralph Raymond Rebecca Richard Robert Roger Ronald
Rosa Roy Russell Ruth Samuel Sandra Sarah Sharon Sheila Simon Sophia Stanley Stella Stephen Susan Sylvia Teresa Thomas
Timothy Tobias Ursula Valerie Vera Vernon Victor Vincent Viola Virginia Walter Wanda Warren Wendy Wilfred William
Winston
""")
CITIES = _split("""
Paris London Berlin Madrid Rome Vienna Prague Warsaw Lisbon Dublin Oslo Helsinki Athens Cairo Nairobi Lagos Tunis Delhi
Mumbai Tokyo Osaka Seoul Beijing Shanghai Hanoi Bangkok Jakarta Manila Sydney Perth Auckland Toronto Montreal Boston
Chicago Denver Houston Seattle Miami Lima Bogota Quito Santiago Havana Istanbul Ankara Tehran Baghdad Dubai Doha Zurich
Geneva Milan Naples Hamburg Munich Brussels Antwerp Porto Krakow Budapest Sofia
""")
SYLLABLES = _split("""
ba be bor cal da del dor el fa fen gar gol ha hil jor ka kel lan lo mar mi nor or pel ra ril sa sol ta tor ul va ven
wil zan zor
""")
NOUNS = _split("""
river mountain garden window letter market teacher engine bottle village forest kitchen bridge hammer candle blanket
station captain doctor farmer painter harbour castle orchard lantern mirror basket carpet ladder wagon pencil journal
library museum theatre factory tower valley meadow island desert ocean cloud thunder winter summer morning evening
sailor soldier baker carpenter merchant neighbour stranger traveller horse rabbit sparrow falcon turtle salmon beetle
violin trumpet piano chimney cellar attic fountain statue compass anchor barrel shovel needle ribbon saddle kettle
""")
ADJECTIVES = _split("""
quiet ancient narrow heavy gentle broken wooden silver golden distant hidden empty crowded bitter sweet hollow smooth
rough bright dusty frozen humble clever patient nervous cheerful lonely famous modest curious careful stubborn graceful
faded polished tangled crooked fragile sturdy shallow steep
""")
VERBS = _split("""
carried painted noticed repaired borrowed remembered ignored admired watched followed measured described collected
cleaned moved opened closed counted sketched guarded visited sold bought lifted lowered studied copied praised missed
""")
ADVERBS = _split("""
slowly quickly quietly often rarely suddenly carefully proudly gladly sadly barely nearly always never again together
alone early late yesterday
""")
PLACES = _split("""
Northgate Riverside Oldtown Westbrook Eastfield Hillcrest Lakeside Stonebridge Ashford Fairview Kingsport Maplewood
Redcliff Silverton Whitby Thornbury
""")
COLOURS = _split("red green blue yellow orange purple pink cyan")
SHAPES = _split("circle square triangle cross")


def made_up_name(rng: random.Random) -> str:
    """A name of two to four syllables that is in no list."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 4))).capitalize()
