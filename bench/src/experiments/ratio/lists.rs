//! Lists: pages in order, each in one list at most; from any place to the young end in a few steps.
//!
//! ```text
//!   heads    list 0: oldest <-> .. <-> youngest       list 1: ..          a ring through its head each
//!   pages    younger, older, list: an array each, by the page's number
//! ```

pub type Chain = usize;

const NONE: u8 = u8::MAX;

pub struct Chains<const N: usize> {
    /// Neighbours: of each page, and behind them of each list's head.
    links: Vec<[u32; 2]>,
    list: Vec<u8>,
    lens: [usize; N],
}

const OLDER: usize = 0;
const YOUNGER: usize = 1;

impl<const N: usize> Chains<N> {
    pub fn new(unique: usize) -> Self {
        let links = (0..unique + N).map(|at| [at as u32; 2]).collect();
        Self { links, list: vec![NONE; unique], lens: [0; N] }
    }

    fn head(&self, chain: Chain) -> u32 {
        (self.list.len() + chain) as u32
    }

    pub fn of(&self, page: u32) -> Option<Chain> {
        let list = self.list[page as usize];
        (list != NONE).then_some(usize::from(list))
    }

    pub fn len(&self, chain: Chain) -> usize {
        self.lens[chain]
    }

    pub fn oldest(&self, chain: Chain) -> Option<u32> {
        let oldest = self.links[self.head(chain) as usize][YOUNGER];
        (oldest != self.head(chain)).then_some(oldest)
    }

    /// The page that came to `chain` next after `page`, which is in it.
    pub fn younger(&self, chain: Chain, page: u32) -> Option<u32> {
        let younger = self.links[page as usize][YOUNGER];
        (younger != self.head(chain)).then_some(younger)
    }

    pub fn put(&mut self, chain: Chain, page: u32) {
        self.remove(page);
        let head = self.head(chain);
        let youngest = self.links[head as usize][OLDER];
        self.links[page as usize] = [youngest, head];
        self.links[youngest as usize][YOUNGER] = page;
        self.links[head as usize][OLDER] = page;
        self.list[page as usize] = chain as u8;
        self.lens[chain] += 1;
    }

    pub fn pop_oldest(&mut self, chain: Chain) -> Option<u32> {
        let page = self.oldest(chain)?;
        self.remove(page);
        Some(page)
    }

    pub fn remove(&mut self, page: u32) {
        let Some(chain) = self.of(page) else { return };
        let [older, younger] = self.links[page as usize];
        self.links[older as usize][YOUNGER] = younger;
        self.links[younger as usize][OLDER] = older;
        self.list[page as usize] = NONE;
        self.lens[chain] -= 1;
    }
}
